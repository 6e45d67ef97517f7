/* aether: PID 1 of a sandbox. One thread, one epoll loop, no timer while idle. */
#ifndef DSEC_AETHER_H
#define DSEC_AETHER_H

#include "config.h"
#include "frame.h"
#include "sys.h"

#include <sys/types.h>

int launcher_main(void);
int aether_main(int control);

/* --- the loop (loop.c) --- */
struct source {
    void (*ready)(struct source *s, uint32_t events);
    int fd;
    uint32_t events; /* 0: not in the epoll set */
};

int loop_open(void);
void loop_watch(struct source *s, uint32_t events); /* 0: not any more */
int loop_run(void);                                 /* until loop_end */
void loop_end(int status);
int64_t now_ns(void); /* CLOCK_MONOTONIC */
/* Reads and drops what a left-over descriptor still gets, so that a daemon that writes is neither stopped nor killed. */
void sink(int fd);

/* --- one sandbox --- */
struct aether {
    struct config cfg;
    uint8_t instance[16];
    int root, proc; /* "/" inside, and a whole procfs that no path leads to */
    struct spawn_report *report;
    struct op *ops;
    uint32_t n_ops;
    struct session *sessions;
};
extern struct aether self;

/* Enters the sandbox. NULL, or what went wrong, with errno. */
const char *enter(struct config *c);

/* --- the connection to the edge (conn.c) --- */
void conn_open(int fd);
void conn_listen(int fd);
bool conn_room(void); /* may DATA be queued? */
void conn_send(uint32_t channel, uint8_t type, uint8_t flags, const void *p, size_t n);
void conn_send_u64(uint32_t channel, uint8_t type, uint8_t flags, uint64_t v);
void conn_failure(uint32_t channel, const char *code, int error, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void conn_flush(void);

/* --- operations (op.c) --- */
enum op_kind { OP_EXEC, OP_SHELL, OP_WORK, OP_DIAL };
enum reason { R_NONE, R_TIMED_OUT, R_LIMIT, R_KILLED };

/* What a stream produced: bytes [base, base+len) are held; below base the edge has them safe. */
struct output {
    struct buf held;
    uint64_t base, sent, total, kept;
    bool ended, end_sent;
};

struct op {
    struct op *next;
    char *id;
    const char *kind_name;
    enum op_kind kind;
    uint32_t channel; /* 0: on none */
    bool ended, failed, final_sent, started_sent, exited, known;
    pid_t pid;
    struct source out, err, in; /* descriptors of ours; fd -1: closed */
    bool single;                /* one stream only (tty, content) */
    int out_stream;
    struct output streams[STREAMS];
    struct buf input;
    uint64_t input_taken;
    bool takes_input, input_open, input_end;
    bool unread; /* a session's input that its command has not opened yet: closing it now would lose it */
    uint64_t limit;
    bool kill_at_limit;
    int64_t deadline; /* ns; 0: none */
    enum reason reason;
    char *session_name;
    int slave; /* of its terminal; -1: none */
    int signaled; /* the last signal asked for; 0: none */
    bool was_shell_end, was_put_back, signaled_alone; /* alone: not its children */
    int wait_status;
    int64_t started_wall, started, user_us, system_us, rss_kib, finished;
    int64_t oom_before;
    int64_t start_ticks;
    pid_t last_pid;
    struct session *session;
    struct shell_request *shell;
    struct op *queue_next;
    bool replaced;
    int exit_code;
    char *cwd;
    struct buf work_result; /* of a worker: one byte of type, then the payload */
    struct source result_pipe; /* of a dial: the socket that is not connected yet */
    int port;
    const char *const *addresses; /* of a dial: those not tried */
    int read_error;
    struct buf final; /* RESULT or ERROR payload */
};

struct op *op_find(const char *id);
struct op *op_by_channel(uint32_t channel);
struct op *op_new(const char *id, const char *kind_name, enum op_kind kind, uint32_t channel);
void op_start(uint32_t channel, const uint8_t *payload, size_t n);
void op_attach(uint32_t channel, const uint8_t *payload, size_t n);
void op_detach_all(void);
bool op_frame(const struct frame *f); /* false: a breach */
void op_list(void);
void op_pump(struct op *o);
void op_send_all(void);
void op_started(struct op *o);
void op_fail(struct op *o, const char *code, int error, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void op_finish_command(struct op *o, const char *reason, int exit_code, int sig);
void op_child_exited(pid_t pid, int status, const void *rusage);
int64_t op_next_deadline(void);
void op_check_deadlines(void);
void op_watch_input(struct op *o);
void op_feed(struct op *o);
void op_output_done(struct op *o);

/* --- programs (exec.c) --- */
enum { SPAWN_USER = 1, SPAWN_CWD, SPAWN_EXEC, SPAWN_SETUP };
struct spawn_report {
    int stage, error;
    char what[128];
};

struct identity {
    uid_t uid;
    gid_t gid;
    gid_t groups[64];
    int n_groups;
    char name[64], home[256], shell[128];
};

struct program {
    char **argv, **env;
    const char *cwd;
    struct identity who;
    int fd[3];
    int extra[3]; /* become descriptors 7, 8, 9; -1: none */
    bool tty;
};

pid_t spawn_program(const struct program *p); /* -1: see self.report */
pid_t spawn_worker(const struct identity *who, int (*body)(void *), void *arg);
void become_user(const struct identity *who); /* in a child; exits on failure */
char **make_env(const struct identity *who, char **extra, const char *marker_name, const char *marker);
const char *env_get(char **env, const char *name);
void exec_start(struct op *o, struct mp *m, uint32_t fields);
bool exec_resize(struct op *o, int rows, int columns);
void fail_spawn(struct op *o, const char *program);

/* users.c: 0, or an errno; ENOENT: no such user. */
int find_identity(const char *spec, struct identity *out);

/* --- shell sessions (chronus.c) --- */
void chronus_start(struct op *o, struct mp *m, uint32_t fields);
void chronus_close_session(struct op *o, struct mp *m);
bool chronus_child_exited(pid_t pid, int status);
void chronus_forget(struct op *o); /* it is about to be freed */
void chronus_timeout(struct op *o);
void chronus_finish(struct op *o); /* its command has ended and its output is all there */
void chronus_signal(struct op *o, int sig, bool tree);
int64_t chronus_next_deadline(void);
void chronus_check_deadlines(void);

/* --- process trees (tree.c) --- */
void mark_start(struct op *o);
/* Signals what descends from `root`, and orphans whose DSEC_OP or DSEC_SESSION is `marker`; only what began
 * after `o` (NULL: everything), and not `spare`. Returns how many were signalled. */
int kill_tree(pid_t root, const char *marker, const struct op *o, pid_t spare, int sig);
int64_t oom_kills(void);

/* --- connections to ports inside (dial.c) --- */
void dial_start(struct op *o, struct mp *m);
void dial_settle(struct op *o); /* has it ended? */

/* --- workers for files (work.c) --- */
void work_start(struct op *o, const char *kind, const uint8_t *payload, size_t n);
/* files.c, in the worker: answers on `result` and ends. */
int worker_main(const char *kind, const uint8_t *payload, size_t n, int in, int out, int result);

#endif
