/* chronus: shell sessions. One shell of the sandbox's own per session, which reads the number of its next
 * command from a pipe and reports status and directory on another. Command text, output FIFOs and the saved
 * environment lie in a tmpfs that no path leads to. Nothing that a command prints is protocol; what runs in the shell
 * could forge its status, and the docs say so. */
#include "aether.h"

#include <ctype.h>
#include <signal.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { GRACE_MS = 1000, LOOK_AGAIN_MS = 20, STATUS_LIMIT = 16 << 10, ABANDON = 63, MAX_VARIABLE = 255 };

struct session {
    struct session *next;
    char *name, *user;
    struct identity who;
    pid_t pid;
    int commands, dir;
    int writers[2]; /* of the FIFOs of the command that runs, so that they have no end before it has */
    struct source status;
    struct buf report;
    struct op *current, *queue;
    unsigned number;
    char *cwd;
    bool one_shot, was_replaced, closing;
    int64_t kill_at, look_at;
};

struct shell_request {
    char *session, *cwd, *user, **extra;
    struct buf command;
    bool stdin_wanted, background, kill_at_limit;
    int64_t timeout_ms, limit;
};

/* A shell that is told to abandon its command (ABANDON) leaves it by `continue` and reports at the head of its
 * loop; inside a function `continue` has no effect, and the shell ends itself, to be replaced. Whatever the user has
 * set (IFS, noclobber, nounset, xtrace) holds in the loop too: hence the quotes, `>|` and the redirections' places. */
#define HERE "/proc/self/fd/7/"
#define FILE_OF(kind) "\"" HERE kind "$__dsec_n\""
/* What the saved environment says of the session and of the directory may be another's, or gone. */
#define LOAD                                                                                         \
    "__dsec_r=0 __dsec_n= __dsec_f=0; if [ -s " HERE "env ]; then "                                  \
    "__dsec_m=$DSEC_SESSION __dsec_w=$PWD; . " HERE "env; export DSEC_SESSION=\"$__dsec_m\"; "       \
    "[ \"$PWD\" -ef . ] || PWD=$__dsec_w; fi; "
#define REPORT(BUILTIN)                                                                              \
    "if [ -n \"$__dsec_n\" ]; then if [ -z \"$__dsec_d\" ]; then __dsec_r=124; fi; "                 \
    "if [ \"$__dsec_f\" = 1 ]; then " BUILTIN "eval \"$__dsec_q\" || :; fi; "                        \
    BUILTIN "export -p >|" HERE "env || :; "                                                         \
    BUILTIN "printf '%s %s\\n%s\\0' \"$__dsec_n\" \"$__dsec_r\" \"$PWD\" >&8; fi; "                  \
    "IFS=' ' " BUILTIN "read -r __dsec_n __dsec_f __dsec_g <&9 || break; __dsec_d=; "
/* That the input is open is told of ("<number> -"): its writer must not close it before. */
#define RUN(BUILTIN)                                                                                 \
    "{ if [ \"$__dsec_g\" = 1 ]; then " BUILTIN "printf '%s -\\n\\0' \"$__dsec_n\" >&8; fi; "        \
    "case $- in *e*) ;; *) __dsec_t ;; esac; "                                                       \
    BUILTIN "eval \"$__dsec_c\" >" FILE_OF("o") " 2>" FILE_OF("e") " 7<&- 8>&- 9<&-; } <"            \
    FILE_OF("i") "; __dsec_r=$?; __dsec_d=1; "

static const char BASH_LOOP[] =
    "__dsec_t() { return \"$__dsec_r\"; }; "
    "trap 'if [ -n \"${FUNCNAME-}\" ]; then builtin kill -9 \"$$\"; fi; builtin continue 999' 63; "
    LOAD "while :; do " REPORT("builtin ")
    "IFS= builtin read -r -d '' __dsec_c <" FILE_OF("c") " || :; "
    "if [ \"$__dsec_f\" = 1 ]; then "
    "IFS= builtin read -r -d '' __dsec_p <" FILE_OF("p") " || :; "
    "IFS= builtin read -r -d '' __dsec_q <" FILE_OF("q") " || :; "
    "builtin eval \"$__dsec_p\" 2>" FILE_OF("e") "; fi; "
    RUN("builtin ") "done";

static const char POSIX_LOOP[] =
    "__dsec_load() { __dsec_v=; while IFS= read -r __dsec_l; do __dsec_v=\"$__dsec_v$__dsec_l\n\"; done; "
    "__dsec_v=$__dsec_v$__dsec_l; }; "
    "__dsec_t() { return \"$__dsec_r\"; }; "
    "trap 'continue 999' 63 2>/dev/null || :; "
    LOAD "while :; do " REPORT("")
    "__dsec_load <" FILE_OF("c") "; __dsec_c=$__dsec_v; "
    "if [ \"$__dsec_f\" = 1 ]; then __dsec_load <" FILE_OF("p") "; __dsec_p=$__dsec_v; "
    "__dsec_load <" FILE_OF("q") "; __dsec_q=$__dsec_v; "
    "eval \"$__dsec_p\" 2>" FILE_OF("e") "; fi; "
    RUN("") "done";

static void next_command(struct session *s);
static void status_ready(struct source *src, uint32_t events);

static void free_request(struct shell_request *r)
{
    if (!r)
        return;
    free(r->session);
    free(r->cwd);
    free(r->user);
    free_strings(r->extra);
    buf_free(&r->command);
    free(r);
}

void chronus_forget(struct op *o)
{
    free_request(o->shell);
    o->shell = NULL;
}

static struct session *find_session(const char *name)
{
    struct session *s = self.sessions;
    while (s && (s->one_shot || strcmp(s->name, name)))
        s = s->next;
    return s;
}

/* --- the tmpfs --- */

static int private_tmpfs(void)
{
    int fs = (int)syscall(SYS_fsopen, "tmpfs", K_FSOPEN_CLOEXEC), fd = -1;
    if (fs < 0)
        return -1;
    if (!syscall(SYS_fsconfig, fs, K_FSCONFIG_SET_STRING, "size", "8m", 0) &&
        !syscall(SYS_fsconfig, fs, K_FSCONFIG_SET_STRING, "mode", "0755", 0) &&
        !syscall(SYS_fsconfig, fs, K_FSCONFIG_SET_STRING, "nr_inodes", "256", 0) &&
        !syscall(SYS_fsconfig, fs, K_FSCONFIG_CMD_CREATE, NULL, NULL, 0))
        fd = (int)syscall(SYS_fsmount, fs, K_FSMOUNT_CLOEXEC, MS_NOSUID | MS_NODEV | MS_NOEXEC);
    int e = errno;
    close(fs);
    errno = e;
    return fd;
}

/* Root inside finds the directory through its shell's descriptors, and may have put there what blocks whoever opens it. */
static int put_file(int dir, const char *name, const void *text, size_t n, mode_t mode)
{
    unlinkat(dir, name, 0);
    int fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    if (fd < 0)
        return -1;
    int r = n ? write_all(fd, text, n) : 0;
    close(fd);
    return r;
}

static void copy_file(int from, int to, const char *name)
{
    char text[4096];
    struct stat st;
    int in = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), out = -1;
    if (in >= 0 && fstat(in, &st) == 0 && S_ISREG(st.st_mode) &&
        (out = openat(to, name, O_WRONLY | O_TRUNC | O_NOFOLLOW | O_CLOEXEC)) >= 0)
        for (ssize_t n; (n = read(in, text, sizeof text)) > 0;)
            if (write_all(out, text, (size_t)n))
                break;
    fd_close(&in);
    fd_close(&out);
}

static char *name_of(char out[16], char kind, unsigned number)
{
    snprintf(out, 16, "%c%u", kind, number);
    return out;
}

/* --- sessions --- */

static struct session *new_session(const char *name, const char *user, const struct identity *who, bool one_shot)
{
    struct session *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->name = strdup(name);
    s->user = strdup(user);
    s->who = *who;
    s->one_shot = one_shot;
    s->commands = -1;
    s->status = (struct source){ .ready = status_ready, .fd = -1 };
    s->writers[0] = s->writers[1] = -1;
    s->dir = private_tmpfs();
    if (!s->name || !s->user || s->dir < 0 || put_file(s->dir, "env", NULL, 0, 0666)) {
        int e = errno;
        fd_close(&s->dir);
        free(s->name);
        free(s->user);
        free(s);
        errno = e;
        return NULL;
    }
    s->next = self.sessions;
    self.sessions = s;
    return s;
}

static void close_writers(struct session *s)
{
    fd_close(&s->writers[0]);
    fd_close(&s->writers[1]);
}

static void free_session(struct session *s)
{
    close_writers(s);
    for (struct session **at = &self.sessions; *at; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            break;
        }
    loop_watch(&s->status, 0);
    fd_close(&s->status.fd);
    fd_close(&s->commands);
    fd_close(&s->dir);
    buf_free(&s->report);
    free(s->name);
    free(s->user);
    free(s->cwd);
    free(s);
}

static const char *find_shell(void)
{
    for (char **shell = self.cfg.shells; *shell; shell++) {
        struct stat st;
        if (stat(*shell, &st) == 0 && S_ISREG(st.st_mode) && st.st_mode & 0111)
            return *shell;
    }
    return NULL;
}

/* Where exec begins too, unless the session has been somewhere already that still is there. */
static const char *start_directory(const struct session *s)
{
    struct stat st;
    const char *wanted[] = { s->cwd, *self.cfg.workdir ? self.cfg.workdir : NULL };
    for (size_t i = 0; i < 2; i++)
        if (wanted[i] && stat(wanted[i], &st) == 0 && S_ISDIR(st.st_mode))
            return wanted[i];
    return "/";
}

/* False: the operation has been failed. */
static bool start_shell(struct session *s, struct op *o)
{
    const char *shell = find_shell();
    if (!shell) {
        op_fail(o, "no_shell", ENOENT, "the image has no shell: use exec, or a layer that has one");
        return false;
    }
    const char *base = strrchr(shell, '/') + 1;
    bool bash = !strcmp(base, "bash");
    char *argv_bash[] = { (char *)base, "--norc", "--noprofile", "-c", (char *)BASH_LOOP, (char *)base, NULL };
    char *argv_posix[] = { (char *)base, "-c", (char *)POSIX_LOOP, (char *)base, NULL };
    int commands[2] = { -1, -1 }, status[2] = { -1, -1 };
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    bool ok = null >= 0 && pipe2(commands, O_CLOEXEC) == 0 && pipe2(status, O_CLOEXEC) == 0;
    struct program p = { .argv = bash ? argv_bash : argv_posix, .cwd = start_directory(s), .who = s->who,
                         .fd = { null, null, null }, .extra = { s->dir, status[1], commands[0] } };
    p.env = ok ? make_env(&s->who, NULL, "DSEC_SESSION", s->name) : NULL;
    s->pid = p.env ? spawn_program(&p) : -1;
    free_strings(p.env);
    fd_close(&null);
    fd_close(&commands[0]);
    fd_close(&status[1]);
    if (s->pid < 0) {
        s->pid = 0;
        fd_close(&commands[1]);
        fd_close(&status[0]);
        if (self.report->stage == SPAWN_EXEC)
            op_fail(o, "no_shell", self.report->error, "the image's shell %s cannot be run: %s", shell,
                    strerror(self.report->error));
        else
            fail_spawn(o, shell);
        return false;
    }
    s->commands = commands[1];
    s->status.fd = status[0];
    fcntl(s->status.fd, F_SETFL, O_NONBLOCK);
    fcntl(s->commands, F_SETFL, O_NONBLOCK); /* what runs inside could fill the pipe */
    loop_watch(&s->status, EPOLLIN);
    return true;
}

/* --- one command --- */

static void put_quoted(struct buf *b, const char *text)
{
    buf_put(b, "'", 1);
    for (; *text; text++)
        buf_put(b, *text == '\'' ? "'\\''" : text, *text == '\'' ? 4 : 1);
    buf_put(b, "'", 1);
}

static void put_text(struct buf *b, const char *text)
{
    buf_put(b, text, strlen(text));
}

/* What is to hold for this command alone is set before it and put back after it. */
static void around(const struct shell_request *r, struct buf *before, struct buf *after)
{
    for (char **e = r->extra; *e; e++) {
        char name[MAX_VARIABLE + 1];
        snprintf(name, sizeof name, "%.*s", (int)(strchr(*e, '=') - *e), *e);
        char text[2048];
        snprintf(text, sizeof text, "__dsec_h_%s=${%s+x}; __dsec_s_%s=${%s-}; export %s=", name, name, name, name, name);
        put_text(before, text);
        put_quoted(before, strchr(*e, '=') + 1);
        put_text(before, "\n");
        snprintf(text, sizeof text,
                 "if [ \"$__dsec_h_%s\" ]; then export %s=\"$__dsec_s_%s\"; else unset %s; fi; "
                 "unset __dsec_h_%s __dsec_s_%s\n", name, name, name, name, name, name);
        put_text(after, text);
    }
    if (*r->cwd) {
        put_text(before, "__dsec_w=$PWD; cd -- ");
        put_quoted(before, r->cwd);
        put_text(before, " || __dsec_c='(exit 1)'\n");
        put_text(after, "cd -- \"$__dsec_w\"\n");
    }
}

static int make_fifo(struct session *s, char kind, int flags, int *writer)
{
    char name[16];
    name_of(name, kind, s->number);
    int fd = mkfifoat(s->dir, name, 0666) ? -1 : openat(s->dir, name, flags | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0 && writer && (*writer = openat(s->dir, name, O_WRONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC)) < 0)
        fd_close(&fd);
    return fd;
}

static bool lay_out(struct session *s, struct op *o)
{
    struct shell_request *r = o->shell;
    char name[16];
    unsigned n = ++s->number;
    bool special = *r->cwd || *r->extra;
    struct buf before = { 0 }, after = { 0 };
    if (special)
        around(r, &before, &after);
    bool ok = put_file(s->dir, name_of(name, 'c', n), r->command.p, r->command.len, 0644) == 0;
    if (special)
        ok = ok && put_file(s->dir, name_of(name, 'p', n), before.p, before.len, 0644) == 0 &&
             put_file(s->dir, name_of(name, 'q', n), after.p, after.len, 0644) == 0;
    buf_free(&before);
    buf_free(&after);
    ok = ok && (o->out.fd = make_fifo(s, 'o', O_RDONLY, &s->writers[0])) >= 0 &&
         (o->err.fd = make_fifo(s, 'e', O_RDONLY, &s->writers[1])) >= 0;
    if (ok && !r->stdin_wanted)
        return symlinkat("/dev/null", s->dir, name_of(name, 'i', n)) == 0;
    /* The input is open for both ends, so that the shell's open finds a writer, and closing it is the end of the input.
     * Closed before the shell has opened it, its bytes would be lost, and the shell would wait for a writer for ever. */
    o->unread = true;
    return ok && (o->in.fd = make_fifo(s, 'i', O_RDWR, NULL)) >= 0;
}

static void clear_away(struct session *s)
{
    char name[16];
    for (const char *kind = "cpqoei"; *kind; kind++)
        unlinkat(s->dir, name_of(name, *kind, s->number), 0);
    close_writers(s);
}

/* The shell has ended and is not reaped yet, or does not read: the command waits for the next one. */
static void put_back(struct session *s, struct op *o)
{
    struct source *ours[] = { &o->out, &o->err, &o->in };
    for (int i = 0; i < 3; i++)
        fd_close(&ours[i]->fd);
    clear_away(s);
    s->current = NULL;
    o->unread = false;
    o->was_put_back = true; /* the next shell is given it in any case, and may end with it */
    o->queue_next = s->queue;
    s->queue = o;
    kill(s->pid, SIGKILL);
}

/* Begins the first command in the queue, when none runs. */
static void next_command(struct session *s)
{
    while (!s->current && s->queue) {
        struct op *o = s->queue;
        s->queue = o->queue_next;
        o->queue_next = NULL;
        o->replaced = s->was_replaced;
        s->was_replaced = false;
        if (!s->pid && !start_shell(s, o)) {
            o->session = NULL;
            continue;
        }
        char line[48];
        s->current = o;
        o->pid = s->pid;
        o->started = now_ns();
        mark_start(o);
        errno = 0;
        bool ok = lay_out(s, o);
        int e = errno;
        int n = snprintf(line, sizeof line, "%u %d %d\n", s->number, *o->shell->cwd || *o->shell->extra ? 1 : 0,
                         o->shell->stdin_wanted);
        if (!ok) {
            s->current = NULL;
            o->session = NULL;
            op_fail(o, e == ENOSPC ? "disk_full" : "unavailable", e, "session %s: %s", s->name, strerror(e));
            clear_away(s);
            continue;
        }
        if (write_all(s->commands, line, (size_t)n) && !o->was_put_back) {
            put_back(s, o);
            return;
        }
        o->deadline = o->shell->timeout_ms > 0 ? now_ns() + o->shell->timeout_ms * 1000000 : 0;
        loop_watch(&o->out, EPOLLIN);
        loop_watch(&o->err, EPOLLIN);
        op_feed(o);
    }
    if (s->one_shot && !s->current && !s->queue)
        fd_close(&s->commands); /* the loop reads the end, and the shell goes */
    if (!s->pid && !s->current && (s->one_shot || !s->number)) /* it has had no shell at all: nothing is in it to keep */
        free_session(s);
}

/* The shell is to export them. */
static bool are_names(char **extra)
{
    for (char **e = extra; *e; e++) {
        size_t n = 0;
        for (; isalnum((unsigned char)(*e)[n]) || (*e)[n] == '_'; n++) {
        }
        if (!n || n > MAX_VARIABLE || (*e)[n] != '=' || isdigit((unsigned char)**e))
            return false;
    }
    return true;
}

static struct shell_request *parse_shell(struct mp *m, uint32_t fields)
{
    struct shell_request *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->session = slice_dup(mp_read_bytes(m));
    struct slice command = mp_read_bytes(m);
    bool fits = command.n <= MAX_COMMAND && !memchr(command.p, 0, command.n);
    if (fits)
        buf_put(&r->command, command.p, command.n);
    r->cwd = slice_dup(mp_read_bytes(m));
    r->extra = read_env(m);
    r->user = slice_dup(mp_read_bytes(m));
    r->stdin_wanted = mp_read_bool(m);
    r->background = mp_read_bool(m);
    r->timeout_ms = mp_read_int(m);
    r->limit = mp_read_int(m);
    r->kill_at_limit = mp_read_bool(m);
    if (fields >= 12 && !m->bad && fits && r->session && *r->session && r->cwd && r->extra && r->user)
        return r;
    free_request(r);
    return NULL;
}

/* A shell of its own that begins where the session is, and ends with its command. */
static struct session *apart(struct session *from, struct op *o, const char *user, const struct identity *who)
{
    struct session *s = new_session(o->id, user, who, true);
    if (s && from) {
        s->cwd = from->cwd ? strdup(from->cwd) : NULL;
        copy_file(from->dir, s->dir, "env");
    }
    return s;
}

void chronus_start(struct op *o, struct mp *m, uint32_t fields)
{
    struct shell_request *r = o->shell = parse_shell(m, fields);
    struct identity who;
    if (!r) {
        op_fail(o, "invalid_argument", 0, "shell: a session, and a command of at most %d bytes with no NUL", MAX_COMMAND);
        return;
    }
    struct session *named = find_session(r->session), *s = named;
    const char *user = *r->user ? r->user : named ? named->user : self.cfg.user;
    if (!are_names(r->extra)) {
        op_fail(o, "invalid_argument", 0, "shell: names of variables have letters, figures and _, at most %d", MAX_VARIABLE);
    } else if (find_identity(user, &who)) {
        op_fail(o, "user_not_found", ENOENT, "the image has no user or group %s", user);
    } else if (named && !r->background && strcmp(user, named->user)) {
        op_fail(o, "session_busy", 0, "session %s belongs to %s: use another session", r->session, named->user);
    } else if (r->background ? !(s = apart(named, o, user, &who)) : !s && !(s = new_session(r->session, user, &who, false))) {
        op_fail(o, "resource_exhausted", errno, "session %s: %s", r->session, strerror(errno));
    } else {
        o->session = s;
        o->session_name = strdup(r->session);
        o->limit = r->limit > 0 ? (uint64_t)r->limit : 0;
        o->kill_at_limit = r->kill_at_limit;
        o->takes_input = o->input_open = r->stdin_wanted;
        struct op **at = &s->queue;
        while (*at)
            at = &(*at)->queue_next;
        *at = o;
        next_command(s);
        op_started(o);
        return;
    }
    chronus_forget(o);
}

void chronus_finish(struct op *o)
{
    struct session *s = o->session;
    if (!s || s->current != o)
        return;
    clear_away(s);
    int status = o->wait_status; /* 0: the shell lives and has said how the command ended */
    const char *why = !o->was_shell_end || s->one_shot ? "exited" : "shell_ended";
    if (o->was_shell_end && WIFSIGNALED(status))
        op_finish_command(o, s->one_shot ? "signaled" : why, -1, WTERMSIG(status));
    else
        op_finish_command(o, why, o->was_shell_end ? WEXITSTATUS(status) : o->exit_code, 0);
    chronus_forget(o);
    o->session = NULL;
    s->current = NULL;
    s->kill_at = s->look_at = 0;
    next_command(s);
}

static void ended(struct session *s, int code, const char *cwd, size_t n)
{
    struct op *o = s->current;
    free(s->cwd);
    s->cwd = strndup(cwd, n);
    o->cwd = strndup(cwd, n);
    o->exit_code = code;
    s->kill_at = s->look_at = 0; /* it came back; what is left is to fetch its output */
    o->finished = now_ns();
    o->exited = true;
    op_pump(o);
}

static void opened(struct op *o)
{
    o->unread = false;
    op_feed(o);
}

/* A report is "<number> <status>\n<directory>\0", or "<number> -\n\0" of an input that is open. Whoever writes
 * anything else harms its own session. */
static void take_report(struct session *s, const char *text, size_t n)
{
    unsigned number = 0;
    int code = -1;
    char what[4] = "";
    const char *cwd = memchr(text, '\n', n);
    if (!cwd || sscanf(text, "%u %3s", &number, what) != 2 || !s->current || number != s->number || s->current->exited)
        return;
    cwd++;
    if (!strcmp(what, "-"))
        opened(s->current);
    else if (sscanf(what, "%d", &code) == 1 && code >= 0 && code < 256)
        ended(s, code, cwd, n - (size_t)(cwd - text));
}

static void parse_report(struct session *s)
{
    uint8_t *end;
    while ((end = memchr(s->report.p, 0, s->report.len)) != NULL) {
        size_t n = (size_t)(end - s->report.p);
        take_report(s, (const char *)s->report.p, n);
        buf_drop(&s->report, n + 1);
    }
    if (!s->report.len)
        buf_free(&s->report);
}

static void read_status(struct session *s)
{
    for (;;) {
        if (s->report.len > STATUS_LIMIT || !buf_reserve(&s->report, 1024)) {
            buf_free(&s->report);
            if (s->pid)
                kill(s->pid, SIGKILL);
            return;
        }
        ssize_t n = read(s->status.fd, s->report.p + s->report.len, s->report.cap - s->report.len);
        if (n <= 0) {
            if (n == 0 || (errno != EAGAIN && errno != EINTR))
                loop_watch(&s->status, 0);
            break;
        }
        s->report.len += (size_t)n;
    }
    if (s->report.len)
        parse_report(s);
    else
        buf_free(&s->report);
}

static void status_ready(struct source *src, uint32_t events)
{
    (void)events;
    read_status((struct session *)((char *)src - offsetof(struct session, status)));
}

bool chronus_child_exited(pid_t pid, int status)
{
    struct session *s = self.sessions;
    while (s && s->pid != pid)
        s = s->next;
    if (!s)
        return false;
    read_status(s); /* what it said last */
    s->pid = 0;
    loop_watch(&s->status, 0);
    fd_close(&s->status.fd);
    fd_close(&s->commands);
    struct op *o = s->current;
    if (o && !o->exited) {
        o->was_shell_end = true;
        o->replaced = !s->one_shot;
        o->wait_status = status;
        o->finished = now_ns();
        o->exited = true;
        op_pump(o);
    } else if (!s->one_shot || (!o && s->queue)) {
        s->was_replaced = !s->one_shot;
        next_command(s);
    } else if (!o) {
        free_session(s);
    }
    return true;
}

/* --- ends --- */

static void kill_command(struct session *s, struct op *o, bool shell_too)
{
    if (shell_too && s->pid)
        kill(s->pid, SIGSTOP); /* else it could begin one more when we have looked, and leave it an orphan */
    kill_tree(s->pid, s->name, o, s->pid, SIGKILL);
    if (shell_too && s->pid)
        kill(s->pid, SIGKILL);
}

static bool unqueue(struct session *s, struct op *o)
{
    for (struct op **at = &s->queue; *at; at = &(*at)->queue_next)
        if (*at == o) {
            *at = o->queue_next;
            o->session = NULL;
            op_output_done(o);
            op_finish_command(o, "killed", -1, SIGKILL);
            chronus_forget(o);
            return true;
        }
    return false;
}

void chronus_timeout(struct op *o)
{
    struct session *s = o->session;
    if (!s || unqueue(s, o) || !s->pid || o->exited)
        return;
    if (s->one_shot) {
        kill_command(s, o, true);
        return;
    }
    /* First the signal, which the shell takes when its child is gone: nothing more of the command runs. */
    kill(s->pid, ABANDON);
    kill_command(s, o, false);
    s->kill_at = now_ns() + GRACE_MS * 1000000LL;
    s->look_at = now_ns() + LOOK_AGAIN_MS * 1000000LL;
}

void chronus_signal(struct op *o, int sig, bool tree)
{
    struct session *s = o->session;
    if (sig == SIGKILL) {
        chronus_timeout(o);
        return;
    }
    bool ends = sig == SIGTERM || sig == SIGINT || sig == SIGHUP || sig == SIGQUIT;
    if (!s || (ends && unqueue(s, o)) || s->current != o || !s->pid || o->exited)
        return;
    if (ends && !s->one_shot)
        kill(s->pid, ABANDON); /* taken when what runs has ended, or at once in a loop of the shell's own */
    if (tree || !s->one_shot)
        kill_tree(s->pid, s->name, o, s->one_shot ? 0 : s->pid, sig);
    else
        kill(s->pid, sig);
}

int64_t chronus_next_deadline(void)
{
    int64_t first = 0;
    for (struct session *s = self.sessions; s; s = s->next)
        if (s->look_at && (!first || s->look_at < first))
            first = s->look_at;
    return first;
}

void chronus_check_deadlines(void)
{
    if (!chronus_next_deadline())
        return;
    int64_t now = now_ns();
    for (struct session *s = self.sessions; s; s = s->next) {
        if (!s->look_at || now < s->look_at || !s->current)
            continue;
        bool late = now >= s->kill_at;
        kill_command(s, s->current, late);
        s->look_at = late ? 0 : now + LOOK_AGAIN_MS * 1000000LL;
    }
}

void chronus_close_session(struct op *o, struct mp *m)
{
    char *name = slice_dup(mp_read_bytes(m));
    struct session *s = name ? find_session(name) : NULL;
    if (!s) {
        op_fail(o, "session_not_found", 0, "there is no session %s", name ? name : "");
        free(name);
        return;
    }
    free(name);
    while (s->queue)
        unqueue(s, s->queue);
    if (s->current)
        s->current->reason = R_KILLED;
    kill_command(s, NULL, true); /* what an ended shell left behind, too */
    /* The name is free at once; the rest goes when the shell is reaped. */
    s->one_shot = true;
    if (!s->pid && !s->current)
        free_session(s);
    o->ended = o->exited = true;
    mp_array(&o->final, 1);
    mp_bool(&o->final, true);
}
