/* The launcher: one per core, beside the edge. On Spawn it clones a new aether, with no further exec, so that
 * aether's memory belongs to the host's user namespace and nothing inside can trace it. */
#include "aether.h"
#include "frame.h"
#include "sys.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum { PAIR = -1 }; /* as owner, with no descriptor: not an aether, a pair of namespaces is asked for */
enum { CONTROL = 3, NAMESPACES = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS };

struct spawn {
    int64_t sequence, owner;
    int fds[3]; /* control socket, and a prepared user and network namespace */
    int n_fds;
};

static void send_message(const struct buf *b, const int *fds, size_t n_fds)
{
    struct iovec iov = { b->p, b->len };
    union {
        char raw[CMSG_SPACE(2 * sizeof(int))];
        struct cmsghdr align;
    } space = { 0 };
    struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
    if (n_fds) {
        msg.msg_control = space.raw;
        msg.msg_controllen = CMSG_SPACE(n_fds * sizeof *fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n_fds * sizeof *fds);
        memcpy(CMSG_DATA(c), fds, n_fds * sizeof *fds);
    }
    while (sendmsg(CONTROL, &msg, MSG_NOSIGNAL) < 0)
        if (errno != EINTR)
            _exit(0); /* the edge has gone */
}

static void answer(int64_t sequence, int pid, int error, int pidfd)
{
    struct buf b = { 0 };
    mp_array(&b, 4);
    mp_str(&b, "spawned");
    mp_int(&b, sequence);
    mp_int(&b, pid);
    mp_int(&b, error);
    send_message(&b, &pidfd, pidfd >= 0);
    buf_free(&b);
}

static void answer_pair(int64_t sequence, int error, const int fds[2])
{
    struct buf b = { 0 };
    mp_array(&b, 3);
    mp_str(&b, "paired");
    mp_int(&b, sequence);
    mp_int(&b, error);
    send_message(&b, fds, error ? 0 : 2);
    buf_free(&b);
}

/* 1: a request; 0: the edge has gone; -1: not a request. */
static int receive(struct spawn *s)
{
    uint8_t data[64];
    struct iovec iov = { data, sizeof data };
    union {
        char raw[CMSG_SPACE(3 * sizeof(int))];
        struct cmsghdr align;
    } space;
    struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = space.raw,
                          .msg_controllen = sizeof space.raw };
    ssize_t n = recvmsg(CONTROL, &msg, MSG_CMSG_CLOEXEC);
    if (n <= 0)
        return n < 0 && errno == EINTR ? -1 : 0;
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    s->n_fds = 0;
    if (c && c->cmsg_type == SCM_RIGHTS) {
        s->n_fds = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(s->fds, CMSG_DATA(c), (size_t)s->n_fds * sizeof(int));
    }
    struct mp m = { data, data + n, false };
    uint32_t fields = mp_read_array(&m);
    s->sequence = mp_read_int(&m);
    s->owner = mp_read_int(&m);
    bool known = s->n_fds == 1 || s->n_fds == 3 || (s->n_fds == 0 && s->owner == PAIR);
    return fields < 2 || m.bad || !known ? -1 : 1;
}

/* Raw calls: they change this thread alone and never capabilities (SECBIT_NO_SETUID_FIXUP). */
static int become(int64_t uid)
{
    if (syscall(SYS_setresgid, uid, uid, uid) || syscall(SYS_setresuid, uid, uid, uid))
        return -1;
    return prctl(PR_SET_DUMPABLE, 0);
}

static void inside(int control)
{
    close(CONTROL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_NAME, "aether");
    _exit(aether_main(control));
}

static long clone_aether(uint64_t flags, int *pidfd)
{
    struct k_clone_args args = { .flags = flags | CLONE_PIDFD, .pidfd = (uint64_t)(uintptr_t)pidfd };
    if (!(flags & CLONE_PARENT))
        args.exit_signal = SIGCHLD;
    return syscall(SYS_clone3, &args, sizeof args);
}

/* With a prepared pair: a child enters both, and clones the rest for its own parent. pid and pidfd come
 * back over memory that both see: CLONE_FILES and CLONE_VM hold until the child has ended. */
static long spawn_in_pair(const struct spawn *s, int *pidfd)
{
    int report[2];
    if (pipe2(report, O_CLOEXEC | O_NONBLOCK))
        return -1;
    struct k_clone_args args = { .flags = CLONE_FILES, .exit_signal = SIGCHLD };
    long middle = syscall(SYS_clone3, &args, sizeof args);
    if (middle == 0) {
        long result[2] = { -1, -1 };
        int fd = -1;
        if (setns(s->fds[1], CLONE_NEWUSER) == 0 && setns(s->fds[2], CLONE_NEWNET) == 0) {
            result[0] = clone_aether(NAMESPACES | CLONE_PARENT, &fd);
            if (result[0] == 0) {
                /* The table of descriptors is shared with the launcher until here. */
                if (unshare(CLONE_FILES))
                    _exit(70);
                inside(s->fds[0]);
            }
        }
        result[1] = result[0] > 0 ? fd : errno;
        write_all(report[1], result, sizeof result);
        _exit(0);
    }
    long result[2] = { -1, errno };
    /* The child shares our descriptors: its end of the pipe is closed when it has ended, not before. */
    if (middle > 0) {
        waitpid((pid_t)middle, NULL, 0);
        if (read(report[0], result, sizeof result) != sizeof result)
            result[0] = -1, result[1] = EIO;
    }
    close(report[0]);
    close(report[1]);
    if (result[0] > 0)
        *pidfd = (int)result[1];
    else
        errno = (int)result[1];
    return result[0];
}

static void spawn(const struct spawn *s)
{
    int pidfd = -1;
    long pid = -1;
    if (become(s->owner) == 0) {
        if (s->n_fds == 3)
            pid = spawn_in_pair(s, &pidfd);
        else if ((pid = clone_aether(NAMESPACES | CLONE_NEWUSER | CLONE_NEWNET, &pidfd)) == 0)
            inside(s->fds[0]);
    }
    answer(s->sequence, pid > 0 ? (int)pid : 0, pid > 0 ? 0 : errno, pidfd);
    if (pidfd >= 0)
        close(pidfd);
}

/* A user namespace without ids yet, and a network namespace that it owns. A child is born in both and ends at
 * once: it opens them by descriptors that are the launcher's too. */
static void pair(const struct spawn *s)
{
    int report[2], result[3] = { -1, -1, 0 };
    if (pipe2(report, O_CLOEXEC | O_NONBLOCK)) {
        answer_pair(s->sequence, errno, result);
        return;
    }
    struct k_clone_args args = { .flags = CLONE_FILES | CLONE_NEWUSER | CLONE_NEWNET, .exit_signal = SIGCHLD };
    long child = syscall(SYS_clone3, &args, sizeof args);
    if (child == 0) {
        result[0] = open("/proc/self/ns/user", O_RDONLY | O_CLOEXEC);
        result[1] = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
        result[2] = result[0] < 0 || result[1] < 0 ? errno : 0;
        write_all(report[1], result, sizeof result);
        _exit(0);
    }
    if (child < 0)
        result[2] = errno;
    if (child > 0) {
        waitpid((pid_t)child, NULL, 0);
        if (read(report[0], result, sizeof result) != sizeof result)
            result[2] = EIO;
    }
    close(report[0]);
    close(report[1]);
    answer_pair(s->sequence, result[2], result);
    for (int i = 0; i < 2; i++)
        if (result[i] >= 0)
            close(result[i]);
}

static void reap(void)
{
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        struct buf b = { 0 };
        mp_array(&b, 3);
        mp_str(&b, "reaped");
        mp_int(&b, pid);
        mp_int(&b, status);
        send_message(&b, NULL, 0);
        buf_free(&b);
    }
}

int launcher_main(void)
{
    prctl(PR_SET_NAME, "aether-launcher"); /* exec by descriptor names it after the number */
    /* Whatever the edge's process was started with: no sandbox inherits it. */
    if (syscall(SYS_close_range, CONTROL + 1, ~0U, 0))
        return 70;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_SETMASK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals < 0 || fcntl(CONTROL, F_SETFD, FD_CLOEXEC) ||
        prctl(PR_SET_SECUREBITS, K_SECBIT_NO_SETUID_FIXUP | K_SECBIT_KEEP_CAPS) || prctl(PR_SET_DUMPABLE, 0) ||
        syscall(SYS_setgroups, 0, NULL))
        return 71;
    struct pollfd polls[2] = { { CONTROL, POLLIN, 0 }, { signals, POLLIN, 0 } };
    for (;;) {
        if (poll(polls, 2, -1) < 0 && errno != EINTR)
            return 72;
        struct signalfd_siginfo info;
        if (polls[1].revents) {
            while (read(signals, &info, sizeof info) > 0) {
            }
            reap();
        }
        if (!polls[0].revents)
            continue;
        struct spawn request = { 0 };
        int r = receive(&request);
        if (r == 0)
            return 0;
        if (r > 0 && request.owner == PAIR)
            pair(&request);
        else if (r > 0)
            spawn(&request);
        for (int i = 0; i < request.n_fds; i++)
            close(request.fds[i]);
    }
}
