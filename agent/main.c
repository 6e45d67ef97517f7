/* `aether launcher`: see launcher.c. A clone of it goes on here, as PID 1 of a sandbox. */
#include "aether.h"

#include <signal.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

struct aether self = { .root = -1, .proc = -1 };

/* One frame, with all descriptors at its first byte. NULL: the edge has gone, or it is no CONFIG. */
static uint8_t *receive_config(int control, size_t *length, int *fds, int *n_fds)
{
    uint8_t head[FRAME_HEADER];
    struct iovec iov = { head, sizeof head };
    union {
        char raw[CMSG_SPACE(MAX_FDS * sizeof(int))];
        struct cmsghdr align;
    } space;
    struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = space.raw,
                          .msg_controllen = sizeof space.raw };
    ssize_t n;
    while ((n = recvmsg(control, &msg, MSG_CMSG_CLOEXEC | MSG_WAITALL)) < 0 && errno == EINTR) {
    }
    struct cmsghdr *c = n == FRAME_HEADER ? CMSG_FIRSTHDR(&msg) : NULL;
    if (!c || c->cmsg_type != SCM_RIGHTS || msg.msg_flags & MSG_CTRUNC)
        return NULL;
    *n_fds = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(fds, CMSG_DATA(c), (size_t)*n_fds * sizeof(int));
    *length = (size_t)head[0] | (size_t)head[1] << 8 | (size_t)head[2] << 16 | (size_t)head[3] << 24;
    if (head[8] != F_CONFIG || *length > FRAME_MAX)
        return NULL;
    uint8_t *payload = malloc(*length + 1);
    if (payload && recv(control, payload, *length, MSG_WAITALL) == (ssize_t)*length)
        return payload;
    free(payload);
    return NULL;
}

static void give_up(int control, const char *step)
{
    struct buf text = { 0 }, frame = { 0 };
    char message[400];
    snprintf(message, sizeof message, "entering the sandbox: %s: %s", step, strerror(errno));
    int e = errno;
    mp_array(&text, 3);
    mp_str(&text, "launch_failed");
    mp_str(&text, message);
    mp_int(&text, e);
    frame_put(&frame, 0, F_ERROR, 0, text.p, text.len);
    write_all(control, frame.p, frame.len);
    _exit(70);
}

/* What entering needed is not needed any more; what stays open, nothing inside inherits. */
static void close_spent(const int *fds, int n)
{
    const struct config *c = &self.cfg;
    for (int i = 0; i < n; i++) {
        bool keep = fds[i] == c->listen || fds[i] == c->oom_counter;
        for (uint32_t j = 0; j < c->joins; j++)
            keep = keep || fds[i] == c->join[j];
        if (!keep)
            close(fds[i]);
    }
    for (uint32_t i = 0; i < c->n_steps; i++) {
        free(c->steps[i].op);
        free(c->steps[i].target);
        free(c->steps[i].source);
        free(c->steps[i].data);
    }
}

static void signals_ready(struct source *s, uint32_t events)
{
    (void)events;
    struct signalfd_siginfo info[8];
    while (read(s->fd, info, sizeof info) > 0) {
    }
    int status;
    struct rusage usage;
    for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &usage)) > 0;)
        op_child_exited(pid, status, &usage);
}

static int watch_signals(void)
{
    static struct source signals;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signals = (struct source){ .ready = signals_ready, .fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK) };
    loop_watch(&signals, EPOLLIN);
    return signals.fd < 0 ? -1 : 0;
}

/* By its name a later edge finds whose aether a process is; nothing inside can change it. */
static void name_process(const char *sandbox_id)
{
    char name[16];
    size_t n = strlen(sandbox_id);
    snprintf(name, sizeof name, "ae:%s", sandbox_id + (n > 12 ? n - 12 : 0));
    prctl(PR_SET_NAME, name);
}

int aether_main(int control)
{
    int fds[MAX_FDS], n_fds = 0;
    size_t length = 0;
    uint8_t *payload = receive_config(control, &length, fds, &n_fds);
    if (!payload)
        return 0;
    errno = EINVAL;
    if (!config_parse(&self.cfg, payload, length, fds, n_fds))
        give_up(control, "config");
    free(payload);
    name_process(self.cfg.sandbox_id);
    const char *why = enter(&self.cfg);
    if (why)
        give_up(control, why);
    close_spent(fds, n_fds);
    self.report = mmap(NULL, sizeof *self.report, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (self.report == MAP_FAILED || getrandom(self.instance, sizeof self.instance, 0) < 0 || loop_open() ||
        watch_signals() || fcntl(control, F_SETFL, O_NONBLOCK))
        give_up(control, "loop");
    if (self.cfg.listen >= 0)
        conn_listen(self.cfg.listen);
    conn_open(control);
    conn_flush();
    return loop_run();
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "launcher"))
        return launcher_main();
    fprintf(stderr, "aether: started by the edge, with a control socket on descriptor 3\n");
    return 64;
}
