/* Programs: who they run as, what they may, what they see. */
#include "aether.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <termios.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

static const char DEFAULT_PATH[] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

const char *env_get(char **env, const char *name)
{
    size_t n = strlen(name);
    for (char **e = env; e && *e; e++)
        if (!strncmp(*e, name, n) && (*e)[n] == '=')
            return *e + n + 1;
    return NULL;
}

static void env_set(char **env, const char *name, const char *value, bool replace)
{
    size_t n = strlen(name);
    char **at = env;
    for (; *at; at++)
        if (!strncmp(*at, name, n) && (*at)[n] == '=')
            break;
    if (*at && !replace)
        return;
    char *s = malloc(n + strlen(value) + 2);
    if (!s)
        return;
    sprintf(s, "%s=%s", name, value);
    free(*at);
    *at = s;
}

char **make_env(const struct identity *who, char **extra, const char *marker_name, const char *marker)
{
    size_t n = 16;
    for (char **e = self.cfg.env; *e; e++)
        n++;
    for (char **e = extra; e && *e; e++)
        n++;
    char **env = calloc(n, sizeof *env);
    if (!env)
        return NULL;
    char **lists[2] = { self.cfg.env, extra };
    for (int i = 0; i < 2; i++)
        for (char **e = lists[i]; e && *e; e++) {
            char *sep = strchr(*e, '=');
            *sep = 0;
            env_set(env, *e, sep + 1, true);
            *sep = '=';
        }
    env_set(env, "PATH", DEFAULT_PATH, false);
    env_set(env, "HOME", who->home, false);
    if (who->name[0]) {
        env_set(env, "USER", who->name, false);
        env_set(env, "LOGNAME", who->name, false);
    }
    env_set(env, marker_name, marker, true);
    return env;
}

/* --- in the child --- */

static void die(int stage, const char *what)
{
    self.report->error = errno;
    self.report->stage = stage;
    strncpy(self.report->what, what, sizeof self.report->what - 1);
    _exit(127);
}

static void write_oom_score(void)
{
    char text[16];
    int fd = openat(self.proc, "self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        int n = snprintf(text, sizeof text, "%d", self.cfg.oom_score_adj);
        if (write(fd, text, (size_t)n) < 0) {
            /* Lower than what we have needs a capability of the host; higher is what matters. */
        }
        close(fd);
    }
}

void become_user(const struct identity *who)
{
    write_oom_score();
    for (int cap = 0; cap < 64; cap++)
        if (!(self.cfg.capabilities >> cap & 1) && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) && errno != EINVAL)
            die(SPAWN_SETUP, "drop capability");
    /* From here on changes of uid have their ordinary effect on capabilities, for what runs inside as well. */
    if (prctl(PR_SET_SECUREBITS, 0))
        die(SPAWN_SETUP, "securebits");
    for (uint32_t i = 0; i < self.cfg.n_limits; i++) {
        struct rlimit r = { self.cfg.limits[i].soft, self.cfg.limits[i].hard };
        if (setrlimit(self.cfg.limits[i].resource, &r) && errno != EPERM)
            die(SPAWN_SETUP, "rlimit");
    }
    gid_t groups[65] = { who->gid };
    memcpy(groups + 1, who->groups, (size_t)who->n_groups * sizeof *groups);
    if (syscall(SYS_setgroups, who->n_groups + 1, groups) ||
        syscall(SYS_setresgid, who->gid, who->gid, who->gid))
        die(SPAWN_USER, "group");
    umask(self.cfg.umask);
}

static void change_uid(const struct identity *who)
{
    if (syscall(SYS_setresuid, who->uid, who->uid, who->uid))
        die(SPAWN_USER, "user");
}

static void filter_calls(void)
{
    if (!self.cfg.seccomp_len)
        return;
    struct sock_fprog program = { (unsigned short)(self.cfg.seccomp_len / sizeof(struct sock_filter)),
                                  self.cfg.seccomp };
    /* CAP_SYS_ADMIN is still held, so no_new_privs is not needed, and setuid programs work inside. */
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program))
        die(SPAWN_SETUP, "seccomp");
}

/* An unmapped uid that becomes another keeps all capabilities until exec: give up what the user must not have. */
static void limit_capabilities(const struct identity *who)
{
    struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
    struct __user_cap_data_struct data[2] = { { 0 } };
    for (int i = 0; who->uid == 0 && i < 2; i++)
        data[i].effective = data[i].permitted = (uint32_t)(self.cfg.capabilities >> (32 * i));
    if (syscall(SYS_capset, &head, data))
        die(SPAWN_SETUP, "capabilities");
}

static void plain_signals(void)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    /* An ignored signal would stay ignored through exec. By system call: the C library keeps 32 to 34 to itself. */
    struct { void *handler; unsigned long flags; void *restorer; uint64_t mask; } plain = { 0 };
    for (int sig = 1; sig < 65; sig++)
        syscall(SYS_rt_sigaction, sig, &plain, NULL, sizeof plain.mask);
}

static void join_group(void)
{
    for (uint32_t i = 0; i < self.cfg.joins; i++)
        if (write(self.cfg.join[i], "0", 1) != 1)
            die(SPAWN_SETUP, "join cgroup");
}

static void place_fds(const struct program *p)
{
    /* First out of the way of the numbers that they take. */
    int from[6], to[6] = { 0, 1, 2, 7, 8, 9 };
    for (int i = 0; i < 6; i++) {
        int fd = i < 3 ? p->fd[i] : p->extra[i - 3];
        from[i] = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 20);
    }
    for (int i = 0; i < 6; i++)
        if (from[i] >= 0 && dup2(from[i], to[i]) < 0)
            die(SPAWN_SETUP, "descriptors");
}

static void find_and_exec(const struct program *p)
{
    const char *name = p->argv[0];
    if (strchr(name, '/')) {
        execve(name, p->argv, p->env);
        return;
    }
    const char *path = env_get(p->env, "PATH");
    char full[4096];
    int seen = ENOENT;
    for (const char *dir = path ? path : DEFAULT_PATH; dir;) {
        const char *colon = strchr(dir, ':');
        int n = colon ? (int)(colon - dir) : (int)strlen(dir);
        if (snprintf(full, sizeof full, "%.*s/%s", n, dir, name) < (int)sizeof full) {
            execve(full, p->argv, p->env);
            if (errno != ENOENT && errno != ENOTDIR)
                seen = errno;
        }
        dir = colon ? colon + 1 : NULL;
    }
    errno = seen;
}

static void run_child(const struct program *p)
{
    join_group();
    plain_signals();
    setsid();
    place_fds(p);
    if (p->tty && ioctl(0, TIOCSCTTY, 0))
        die(SPAWN_SETUP, "controlling terminal");
    become_user(&p->who);
    change_uid(&p->who);
    filter_calls();
    limit_capabilities(&p->who);
    /* As the user: the directory must be one that the user may enter. */
    if (chdir(p->cwd))
        die(SPAWN_CWD, p->cwd);
    find_and_exec(p);
    die(SPAWN_EXEC, p->argv[0]);
}

/* CLONE_VFORK without CLONE_VM: we wait until the program runs, and share no memory with what the kernel
 * might kill for the sandbox's sake. */
static long clone_child(bool wait)
{
    struct k_clone_args args = { .flags = wait ? CLONE_VFORK : 0, .exit_signal = SIGCHLD };
    return syscall(SYS_clone3, &args, sizeof args);
}

pid_t spawn_program(const struct program *p)
{
    *self.report = (struct spawn_report){ 0 };
    long pid = clone_child(true);
    if (pid == 0)
        run_child(p);
    if (pid < 0) {
        self.report->stage = SPAWN_SETUP;
        self.report->error = errno;
        strcpy(self.report->what, "clone");
    }
    return self.report->stage ? -1 : (pid_t)pid;
}

pid_t spawn_worker(const struct identity *who, int (*body)(void *), void *arg)
{
    *self.report = (struct spawn_report){ 0 };
    long pid = clone_child(false);
    if (pid != 0)
        return (pid_t)pid;
    join_group();
    plain_signals();
    signal(SIGPIPE, SIG_IGN);
    setsid();
    become_user(who);
    change_uid(who);
    prctl(PR_SET_DUMPABLE, 0);
    filter_calls();
    limit_capabilities(who);
    _exit(body(arg));
}

/* --- in aether --- */

void fail_spawn(struct op *o, const char *program)
{
    int e = self.report->error;
    const char *what = self.report->what;
    switch (self.report->stage) {
    case SPAWN_CWD:
        op_fail(o, e == ENOTDIR ? "not_a_directory" : e == EACCES ? "file_access_denied" : "file_not_found", e,
                "working directory %s: %s", what, strerror(e));
        break;
    case SPAWN_EXEC:
        op_fail(o, "program_not_found", e, "program %s: %s", program, strerror(e));
        break;
    case SPAWN_USER:
        op_fail(o, "user_not_found", e, "%s cannot be taken on here: %s", what, strerror(e));
        break;
    default:
        op_fail(o, e == EAGAIN || e == ENOMEM ? "resource_exhausted" : "unavailable", e,
                "%s could not be started: %s: %s", program, what, strerror(e));
    }
}

static bool make_pipes(struct program *p, struct op *o, bool stdin_wanted)
{
    int out[2] = { -1, -1 }, err[2] = { -1, -1 }, in[2] = { -1, -1 };
    bool ok = pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0;
    if (stdin_wanted)
        ok = ok && pipe2(in, O_CLOEXEC) == 0;
    else
        in[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    o->out.fd = out[0];
    o->err.fd = err[0];
    o->in.fd = in[1];
    p->fd[0] = in[0];
    p->fd[1] = out[1];
    p->fd[2] = err[1];
    int ours[3] = { out[0], err[0], in[1] };
    for (int i = 0; i < 3; i++)
        if (ours[i] >= 0)
            fcntl(ours[i], F_SETFL, O_NONBLOCK);
    return ok;
}

bool exec_resize(struct op *o, int rows, int columns)
{
    struct winsize size = { .ws_row = (unsigned short)rows, .ws_col = (unsigned short)columns };
    return o->single && o->kind == OP_EXEC && o->out.fd >= 0 && ioctl(o->out.fd, TIOCSWINSZ, &size) == 0;
}

static bool make_terminal(struct program *p, struct op *o, int rows, int columns)
{
    int master = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (master < 0)
        return false;
    int unlock = 0;
    int slave = ioctl(master, TIOCSPTLCK, &unlock) ? -1 : ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    o->out.fd = master;
    o->in.fd = fcntl(master, F_DUPFD_CLOEXEC, 0);
    o->single = true;
    if (slave < 0)
        return false;
    exec_resize(o, rows > 0 && rows < 10000 ? rows : 24, columns > 0 && columns < 10000 ? columns : 80);
    if (fchown(slave, p->who.uid, (gid_t)-1)) {
        /* The terminal works without; only `mesg` and the like miss it. */
    }
    for (int i = 0; i < 3; i++)
        p->fd[i] = fcntl(slave, F_DUPFD_CLOEXEC, 0);
    o->slave = slave; /* so that the terminal is not at its end while the program has closed its own */
    return true;
}

struct exec_request {
    char **argv, **extra, *cwd, *user;
    bool stdin_wanted, tty, kill_at_limit;
    int64_t rows, columns, timeout_ms, limit;
};

static bool parse_exec(struct mp *m, uint32_t fields, struct exec_request *r)
{
    r->argv = read_strings(m);
    r->extra = read_env(m);
    r->cwd = slice_dup(mp_read_bytes(m));
    r->user = slice_dup(mp_read_bytes(m));
    r->stdin_wanted = mp_read_bool(m);
    r->tty = mp_read_bool(m);
    r->rows = mp_read_int(m);
    r->columns = mp_read_int(m);
    r->timeout_ms = mp_read_int(m);
    r->limit = mp_read_int(m);
    r->kill_at_limit = mp_read_bool(m);
    return fields >= 13 && !m->bad && r->argv && r->argv[0] && r->argv[0][0] && r->extra && r->cwd && r->user;
}

static void launch(struct op *o, struct program *p, const struct exec_request *r)
{
    bool ready = r->tty ? make_terminal(p, o, (int)r->rows, (int)r->columns)
                        : make_pipes(p, o, r->stdin_wanted);
    if (!ready || !p->env) {
        op_fail(o, "resource_exhausted", errno, "%s: %s", r->tty ? "no terminal" : "no pipe", strerror(errno));
        return;
    }
    mark_start(o);
    o->pid = spawn_program(p);
    if (o->pid < 0) {
        fail_spawn(o, r->argv[0]);
        return;
    }
    o->takes_input = o->input_open = r->stdin_wanted || r->tty;
    o->deadline = r->timeout_ms > 0 ? now_ns() + r->timeout_ms * 1000000 : 0;
    op_started(o);
    op_pump(o);
}

void exec_start(struct op *o, struct mp *m, uint32_t fields)
{
    struct exec_request r = { 0 };
    struct program p = { .fd = { -1, -1, -1 }, .extra = { -1, -1, -1 } };
    if (!parse_exec(m, fields, &r)) {
        op_fail(o, "invalid_argument", 0, "exec: a program, and no NUL in any argument");
    } else if (find_identity(r.user, &p.who)) {
        op_fail(o, "user_not_found", ENOENT, "the image has no user or group %s",
                *r.user ? r.user : self.cfg.user);
    } else {
        o->limit = r.limit > 0 ? (uint64_t)r.limit : 0;
        o->kill_at_limit = r.kill_at_limit;
        p.argv = r.argv;
        p.tty = r.tty;
        p.cwd = *r.cwd ? r.cwd : *self.cfg.workdir ? self.cfg.workdir : "/";
        p.env = make_env(&p.who, r.extra, "DSEC_OP", o->id);
        if (p.env && r.tty)
            env_set(p.env, "TERM", "xterm", false);
        launch(o, &p, &r);
        free_strings(p.env);
    }
    for (int i = 0; i < 3; i++)
        fd_close(&p.fd[i]);
    free_strings(r.argv);
    free_strings(r.extra);
    free(r.cwd);
    free(r.user);
}
