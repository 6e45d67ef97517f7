/* Operations: what is running, what has ended and is not forgotten, and what the edge has not yet got of it. */
#include "aether.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

enum { CHUNK = 64 << 10, WASTE = 64 << 10 };

struct op *op_find(const char *id)
{
    struct op *o = self.ops;
    while (o && strcmp(o->id, id))
        o = o->next;
    return o;
}

struct op *op_by_channel(uint32_t channel)
{
    struct op *o = self.ops;
    while (o && o->channel != channel)
        o = o->next;
    return channel ? o : NULL;
}

static void out_ready(struct source *s, uint32_t events);
static void err_ready(struct source *s, uint32_t events);
static void in_ready(struct source *s, uint32_t events);

struct op *op_new(const char *id, const char *kind_name, enum op_kind kind, uint32_t channel)
{
    struct op *o = calloc(1, sizeof *o);
    if (!o || !(o->id = strdup(id))) {
        free(o);
        return NULL;
    }
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    o->kind_name = kind_name;
    o->kind = kind;
    o->channel = channel;
    o->out = (struct source){ .ready = out_ready, .fd = -1 };
    o->err = (struct source){ .ready = err_ready, .fd = -1 };
    o->in = (struct source){ .ready = in_ready, .fd = -1 };
    o->result_pipe.fd = -1;
    o->slave = -1;
    o->out_stream = S_STDOUT;
    o->started_wall = wall.tv_sec * 1000000000LL + wall.tv_nsec;
    o->started = now_ns();
    o->exit_code = -1;
    o->user_us = o->system_us = -1;
    o->next = self.ops;
    self.ops = o;
    self.n_ops++;
    return o;
}

static void close_source(struct source *s)
{
    loop_watch(s, 0);
    fd_close(&s->fd);
}

static void op_free(struct op *o)
{
    for (struct op **at = &self.ops; *at; at = &(*at)->next)
        if (*at == o) {
            *at = o->next;
            break;
        }
    self.n_ops--;
    close_source(&o->out);
    close_source(&o->err);
    close_source(&o->in);
    close_source(&o->result_pipe);
    fd_close(&o->slave);
    chronus_forget(o);
    for (int i = 0; i < STREAMS; i++)
        buf_free(&o->streams[i].held);
    buf_free(&o->input);
    buf_free(&o->work_result);
    buf_free(&o->final);
    free(o->cwd);
    free(o->session_name);
    free(o->id);
    free(o);
}

static uint64_t held_end(const struct output *s)
{
    return s->base + s->held.len;
}

/* --- output --- */

static bool room(const struct op *o, const struct output *s)
{
    return s->kept >= o->limit || s->held.len < WINDOW;
}

/* Once it is reaped its number may be another's. */
static pid_t root_of(const struct op *o)
{
    return o->exited ? 0 : o->pid;
}

static void over_limit(struct op *o)
{
    if (!o->kill_at_limit || o->reason != R_NONE || o->ended)
        return;
    o->reason = R_LIMIT;
    if (o->kind == OP_SHELL)
        chronus_timeout(o);
    else
        kill_tree(root_of(o), o->id, o, 0, SIGKILL);
}

/* One read. 1: got some; 0: nothing now, or no room; -1: end. */
static int pump_once(struct op *o, int fd, struct output *s)
{
    static uint8_t waste[WASTE];
    ssize_t n;
    if (s->kept >= o->limit) {
        n = read(fd, waste, sizeof waste);
    } else {
        size_t want = WINDOW - s->held.len < CHUNK ? WINDOW - s->held.len : CHUNK;
        if (want > o->limit - s->kept)
            want = (size_t)(o->limit - s->kept);
        n = read(fd, waste, want);
        if (n > 0 && !buf_put(&s->held, waste, (size_t)n)) {
            s->held.failed = false;
            o->limit = s->kept; /* no memory: what follows is counted and dropped */
        } else if (n > 0) {
            s->kept += (uint64_t)n;
        }
    }
    if (n > 0) {
        s->total += (uint64_t)n;
        if (s->total > o->limit)
            over_limit(o);
        return 1;
    }
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (n < 0)
        o->read_error = errno;
    return -1; /* end of file, or EIO of a terminal whose last process has gone */
}

/* Takes what is there. True: nothing is left for now. */
static bool pump(struct op *o, struct source *src, struct output *s)
{
    for (int i = 0; src->fd >= 0 && room(o, s); i++) {
        int r = pump_once(o, src->fd, s);
        if (r > 0 && (i < 64 || o->exited))
            continue;
        if (r == 0)
            return true;
        if (r < 0)
            close_source(src);
        break;
    }
    return src->fd < 0;
}

static void watch_output(struct op *o, struct source *src, const struct output *s)
{
    if (src->fd >= 0)
        loop_watch(src, room(o, s) ? EPOLLIN : 0);
}

void op_output_done(struct op *o)
{
    fd_close(&o->slave);
    struct source *sources[2] = { &o->out, &o->err };
    for (int i = 0; i < 2; i++) {
        int fd = sources[i]->fd;
        loop_watch(sources[i], 0);
        sources[i]->fd = -1;
        if (o->kind == OP_WORK || o->kind == OP_DIAL || fd < 0)
            fd_close(&fd);
        else
            sink(fd);
    }
    o->streams[o->out_stream].ended = true;
    o->streams[S_STDERR].ended = true;
}

static void try_finish(struct op *o)
{
    if (o->ended || !o->exited)
        return;
    bool drained = pump(o, &o->out, &o->streams[o->out_stream]);
    if (!o->single)
        drained = pump(o, &o->err, &o->streams[S_STDERR]) && drained;
    if (!drained) {
        watch_output(o, &o->out, &o->streams[o->out_stream]);
        watch_output(o, &o->err, &o->streams[S_STDERR]);
        return;
    }
    if (o->kind == OP_WORK && (o->out.fd >= 0 || o->result_pipe.fd >= 0)) {
        watch_output(o, &o->out, &o->streams[o->out_stream]);
        return;
    }
    op_output_done(o);
    if (o->kind == OP_EXEC) {
        int status = o->wait_status;
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        int sig = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
        const char *why = sig ? "signaled" : "exited";
        op_finish_command(o, why, code, sig);
    } else if (o->kind == OP_SHELL) {
        chronus_finish(o);
    } else if (o->work_result.len > 0) {
        o->ended = true;
        o->failed = o->work_result.p[0] == F_ERROR;
        buf_put(&o->final, o->work_result.p + 1, o->work_result.len - 1);
        buf_free(&o->work_result);
    } else {
        op_fail(o, o->reason == R_KILLED ? "cancelled" : "unavailable", 0,
                "%s: its worker was ended before it was done", o->kind_name);
    }
}

void op_pump(struct op *o)
{
    if (o->ended)
        return;
    if (o->exited) {
        try_finish(o);
        return;
    }
    pump(o, &o->out, &o->streams[o->out_stream]);
    if (!o->single)
        pump(o, &o->err, &o->streams[S_STDERR]);
    watch_output(o, &o->out, &o->streams[o->out_stream]);
    watch_output(o, &o->err, &o->streams[S_STDERR]);
    if (o->kind == OP_DIAL)
        dial_settle(o);
}

static void out_ready(struct source *s, uint32_t events)
{
    (void)events;
    op_pump((struct op *)((char *)s - offsetof(struct op, out)));
}

static void err_ready(struct source *s, uint32_t events)
{
    (void)events;
    op_pump((struct op *)((char *)s - offsetof(struct op, err)));
}

/* --- input --- */

static void input_gone(struct op *o)
{
    if (o->kind == OP_DIAL && o->in.fd >= 0)
        shutdown(o->in.fd, SHUT_WR);
    if (o->out.fd != o->in.fd || o->kind != OP_EXEC)
        close_source(&o->in);
    o->input_open = false;
    if (o->input.len) {
        o->input_taken += o->input.len;
        buf_free(&o->input);
        if (o->channel)
            conn_send_u64(o->channel, F_ACK, S_STDIN, o->input_taken);
    }
    if (o->kind == OP_DIAL)
        dial_settle(o);
}

static bool is_terminal(const struct op *o)
{
    return o->kind == OP_EXEC && o->single;
}

/* A terminal's end of input is typed. False: it has no room yet. */
static bool end_terminal(struct op *o)
{
    return !is_terminal(o) || o->in.fd < 0 || write(o->in.fd, "\4", 1) == 1 || errno != EAGAIN;
}

void op_feed(struct op *o)
{
    uint64_t before = o->input_taken;
    size_t done = 0;
    while (o->in.fd >= 0 && done < o->input.len) {
        ssize_t n = write(o->in.fd, o->input.p + done, o->input.len - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            break;
        if (n < 0) {
            buf_drop(&o->input, done);
            o->input_taken += done;
            input_gone(o);
            return;
        }
        done += (size_t)n;
    }
    buf_drop(&o->input, done);
    o->input_taken += done;
    if (o->input_taken != before && o->channel)
        conn_send_u64(o->channel, F_ACK, S_STDIN, o->input_taken);
    if (!o->input.len) {
        buf_free(&o->input);
        if (o->input_end && !o->unread && end_terminal(o))
            input_gone(o);
    }
    op_watch_input(o);
}

void op_watch_input(struct op *o)
{
    if (o->in.fd >= 0)
        loop_watch(&o->in, o->input.len || (is_terminal(o) && o->input_end) ? EPOLLOUT : 0);
}

static void in_ready(struct source *s, uint32_t events)
{
    struct op *o = (struct op *)((char *)s - offsetof(struct op, in));
    if (events & EPOLLERR && !(events & EPOLLOUT))
        input_gone(o);
    else
        op_feed(o);
}

static bool take_input(struct op *o, const struct frame *f)
{
    if (f->flags != S_STDIN || o->input_end || o->input.len + f->length > UPLOAD_WINDOW + FRAME_MAX)
        return false;
    if (!o->input_open || o->ended) { /* the reader has gone: everything is taken, and dropped */
        o->input_taken += f->length;
        conn_send_u64(o->channel, F_ACK, S_STDIN, o->input_taken);
        return true;
    }
    if (!buf_put(&o->input, f->payload, f->length))
        return false;
    op_feed(o);
    return true;
}

/* --- results --- */

void op_fail(struct op *o, const char *code, int error, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    buf_free(&o->final);
    mp_array(&o->final, 3);
    mp_str(&o->final, code);
    mp_str(&o->final, text);
    mp_int(&o->final, error);
    o->ended = o->failed = o->exited = true;
    close_source(&o->result_pipe);
    op_output_done(o);
    input_gone(o);
}

/* A signal that the command took lightly did not end it. A shell tells of a signal by 128 and its number, or by 124
 * that it was made to abandon the command. */
static bool ended_by_signal(const struct op *o, int exit_code, int sig)
{
    int by = sig ? sig : o->kind == OP_SHELL && exit_code > 128 ? exit_code - 128 : 0;
    return by ? by == o->signaled || by == SIGKILL : o->kind == OP_SHELL && exit_code == 124;
}

void op_finish_command(struct op *o, const char *reason, int exit_code, int sig)
{
    struct output *out = &o->streams[o->out_stream], *err = &o->streams[S_STDERR];
    int64_t ooms = oom_kills() - o->oom_before;
    if (o->reason == R_TIMED_OUT)
        reason = "timed_out";
    else if (o->reason == R_LIMIT)
        reason = "output_limit";
    else if (ooms > 0 && (sig == SIGKILL || exit_code == 128 + SIGKILL))
        reason = "oom";
    else if (o->reason == R_KILLED && ended_by_signal(o, exit_code, sig))
        reason = "killed";
    struct buf *b = &o->final;
    buf_free(b);
    mp_array(b, 15);
    mp_str(b, reason);
    mp_int(b, exit_code);
    mp_int(b, sig);
    mp_int(b, (int64_t)out->total);
    mp_int(b, (int64_t)err->total);
    mp_int(b, (int64_t)out->kept);
    mp_int(b, (int64_t)err->kept);
    mp_int(b, o->started_wall);
    mp_int(b, (o->finished ? o->finished : now_ns()) - o->started);
    mp_int(b, o->user_us);
    mp_int(b, o->system_us);
    mp_int(b, o->rss_kib);
    mp_int(b, ooms);
    mp_bool(b, o->replaced);
    mp_str(b, o->cwd ? o->cwd : "");
    o->ended = o->exited = true;
    input_gone(o);
}

void op_started(struct op *o)
{
    if (!o->channel || o->started_sent)
        return;
    struct buf b = { 0 };
    mp_array(&b, 2);
    mp_int(&b, o->pid);
    mp_bool(&b, o->known);
    conn_send(o->channel, F_STARTED, 0, b.p, b.len);
    buf_free(&b);
    o->started_sent = true;
}

static bool send_stream(struct op *o, int stream)
{
    struct output *s = &o->streams[stream];
    while (s->sent < held_end(s) && conn_room()) {
        size_t at = (size_t)(s->sent - s->base), n = s->held.len - at;
        if (n > CHUNK)
            n = CHUNK;
        conn_send(o->channel, F_DATA, (uint8_t)stream, s->held.p + at, n);
        s->sent += n;
    }
    if (s->sent < held_end(s))
        return false;
    if (s->ended && !s->end_sent) {
        conn_send(o->channel, F_EOF, (uint8_t)stream, NULL, 0);
        s->end_sent = true;
    }
    return s->ended;
}

static bool has_output(const struct op *o)
{
    return o->kind != OP_WORK || o->out_stream == S_CONTENT;
}

static void send_op(struct op *o)
{
    if (!o->channel || o->final_sent)
        return;
    bool all = true;
    if (has_output(o) && !(o->failed && !o->started_sent)) {
        if (o->started_sent) {
            all = send_stream(o, o->out_stream);
            if (!o->single)
                all = send_stream(o, S_STDERR) && all;
        } else {
            all = false;
        }
    }
    if (!o->ended || (!all && !o->failed))
        return;
    conn_send(o->channel, o->failed ? F_ERROR : F_RESULT, 0, o->final.p, o->final.len);
    o->final_sent = true;
}

void op_send_all(void)
{
    for (struct op *o = self.ops; o; o = o->next)
        send_op(o);
}

void op_detach_all(void)
{
    for (struct op *o = self.ops; o; o = o->next) {
        o->channel = 0;
        o->final_sent = o->started_sent = false;
    }
}

/* --- frames --- */

static void attach(struct op *o, uint32_t channel, uint64_t out_from, uint64_t err_from)
{
    o->channel = channel;
    o->known = true;
    o->final_sent = o->started_sent = false;
    uint64_t from[2] = { out_from, err_from };
    int streams[2] = { o->out_stream, S_STDERR };
    for (int i = 0; i < 2; i++) {
        struct output *s = &o->streams[streams[i]];
        s->sent = from[i] < s->base ? s->base : from[i] > held_end(s) ? held_end(s) : from[i];
        s->end_sent = false;
    }
    op_started(o);
    if (!o->takes_input)
        return;
    /* The edge sends on from what was taken, and its end again. */
    buf_free(&o->input);
    o->input_end = false;
    loop_watch(&o->in, 0);
    conn_send_u64(channel, F_ACK, S_STDIN, o->input_taken);
}

void op_attach(uint32_t channel, const uint8_t *payload, size_t n)
{
    struct mp m = { payload, payload + n, false };
    mp_read_array(&m);
    char *id = slice_dup(mp_read_bytes(&m));
    int64_t out = mp_read_int(&m), err = mp_read_int(&m);
    struct op *o = id && !m.bad ? op_find(id) : NULL;
    if (!o)
        conn_failure(channel, "operation_not_found", 0, "aether knows no operation %s", id ? id : "");
    else if (out < 0 || err < 0 || (uint64_t)out < o->streams[o->out_stream].base ||
             (uint64_t)err < o->streams[S_STDERR].base)
        conn_failure(channel, "invalid_argument", 0, "offsets below what was acknowledged are gone");
    else
        attach(o, channel, (uint64_t)out, (uint64_t)err);
    free(id);
}

static const char *const WORK_KINDS[] = { "read_file", "write_file", "list_dir", "stat", "mkdir", "move",
                                          "remove", "watch", "put_tree", "get_tree", NULL };

static const char *work_kind(struct slice tag)
{
    for (int i = 0; WORK_KINDS[i]; i++)
        if (slice_is(tag, WORK_KINDS[i]))
            return WORK_KINDS[i];
    return NULL;
}

void op_start(uint32_t channel, const uint8_t *payload, size_t n)
{
    struct mp m = { payload, payload + n, false };
    uint32_t fields = mp_read_array(&m);
    struct slice tag = mp_read_bytes(&m);
    char *id = slice_dup(mp_read_bytes(&m));
    const char *work = work_kind(tag);
    struct op *o = NULL;
    if (m.bad || !id || !*id || strlen(id) > 64) {
        conn_failure(channel, "invalid_argument", 0, "no operation id");
    } else if ((o = op_find(id)) != NULL) {
        attach(o, channel, o->streams[o->out_stream].base, o->streams[S_STDERR].base);
    } else if (self.n_ops >= self.cfg.max_operations) {
        conn_failure(channel, "too_many_operations", 0, "%u operations are kept in this sandbox already",
                     self.n_ops);
    } else if (slice_is(tag, "exec")) {
        if ((o = op_new(id, "exec", OP_EXEC, channel)) != NULL)
            exec_start(o, &m, fields);
    } else if (slice_is(tag, "shell")) {
        if ((o = op_new(id, "shell", OP_SHELL, channel)) != NULL)
            chronus_start(o, &m, fields);
    } else if (slice_is(tag, "close_session")) {
        if ((o = op_new(id, "close_session", OP_WORK, channel)) != NULL)
            chronus_close_session(o, &m);
    } else if (slice_is(tag, "dial")) {
        if ((o = op_new(id, "dial", OP_DIAL, channel)) != NULL)
            dial_start(o, &m);
    } else if (work) {
        if ((o = op_new(id, work, OP_WORK, channel)) != NULL)
            work_start(o, work, payload, n);
    } else {
        conn_failure(channel, "unsupported", 0, "aether knows no such request");
    }
    free(id);
}

static void acked(struct op *o, const struct frame *f)
{
    uint64_t to = frame_u64(f);
    if (f->flags >= STREAMS)
        return;
    struct output *s = &o->streams[f->flags];
    if (to > s->sent || to < s->base)
        return;
    buf_drop(&s->held, (size_t)(to - s->base));
    s->base = to;
    if (!s->held.len)
        buf_free(&s->held);
    op_pump(o);
}

static void signalled(struct op *o, const struct frame *f)
{
    struct mp m = { f->payload, f->payload + f->length, false };
    mp_read_array(&m);
    int sig = (int)mp_read_int(&m);
    bool tree = mp_read_bool(&m);
    if (m.bad || o->ended || sig < 1 || sig > 64)
        return;
    o->reason = o->reason == R_NONE ? R_KILLED : o->reason;
    o->signaled = sig;
    o->signaled_alone = !tree;
    if (o->kind == OP_DIAL)
        op_fail(o, "cancelled", 0, "the connection was given up");
    else if (o->kind == OP_SHELL)
        chronus_signal(o, sig, tree);
    else if (o->kind == OP_EXEC && tree)
        kill_tree(root_of(o), o->id, o, 0, sig);
    else if (!o->exited && o->pid > 0)
        kill(o->pid, sig);
}

static void resized(struct op *o, const struct frame *f)
{
    struct mp m = { f->payload, f->payload + f->length, false };
    mp_read_array(&m);
    int64_t rows = mp_read_int(&m), columns = mp_read_int(&m);
    if (!m.bad && !o->ended && rows > 0 && rows < 10000 && columns > 0 && columns < 10000)
        exec_resize(o, (int)rows, (int)columns);
}

bool op_frame(const struct frame *f)
{
    struct op *o = op_by_channel(f->channel);
    if (!o)
        return f->type != F_DATA || f->channel; /* late frames for what was forgotten, or never was */
    switch (f->type) {
    case F_DATA:
        return take_input(o, f);
    case F_EOF:
        if (f->flags != S_STDIN)
            return false;
        o->input_end = true;
        op_feed(o);
        return true;
    case F_ACK:
        acked(o, f);
        return true;
    case F_SIGNAL:
        signalled(o, f);
        return true;
    case F_RESIZE:
        resized(o, f);
        return true;
    default:
        if (o->ended)
            op_free(o);
        else
            conn_failure(f->channel, "wrong_state", 0, "operation %s still runs", o->id);
        return true;
    }
}

void op_list(void)
{
    struct buf b = { 0 };
    mp_array(&b, self.n_ops);
    for (struct op *o = self.ops; o; o = o->next) {
        mp_array(&b, 5);
        mp_str(&b, o->id);
        mp_str(&b, o->kind_name);
        mp_str(&b, o->ended ? "ended" : "running");
        mp_str(&b, o->session_name ? o->session_name : "");
        mp_int(&b, o->pid);
    }
    conn_send(0, F_OPERATIONS, 0, b.p, b.len);
    buf_free(&b);
}

/* --- time and ends --- */

void op_child_exited(pid_t pid, int status, const void *usage)
{
    if (chronus_child_exited(pid, status))
        return;
    for (struct op *o = self.ops; o; o = o->next) {
        if (o->pid != pid || o->exited || o->kind == OP_SHELL)
            continue;
        const struct rusage *r = usage;
        o->exited = true;
        o->finished = now_ns();
        o->wait_status = status;
        o->user_us = r->ru_utime.tv_sec * 1000000LL + r->ru_utime.tv_usec;
        o->system_us = r->ru_stime.tv_sec * 1000000LL + r->ru_stime.tv_usec;
        o->rss_kib = r->ru_maxrss;
        if (o->kind == OP_EXEC && o->reason != R_NONE && (o->reason != R_KILLED || (WIFSIGNALED(status) && !o->signaled_alone)))
            kill_tree(0, o->id, o, 0, SIGKILL);
        try_finish(o);
        return;
    }
}

/* A signal does not call off the deadline: the program may take it lightly. */
static bool has_deadline(const struct op *o)
{
    return o->deadline && !o->ended && (o->reason == R_NONE || o->reason == R_KILLED);
}

int64_t op_next_deadline(void)
{
    int64_t first = 0;
    for (struct op *o = self.ops; o; o = o->next)
        if (has_deadline(o) && (!first || o->deadline < first))
            first = o->deadline;
    return first;
}

void op_check_deadlines(void)
{
    int64_t first = op_next_deadline();
    if (!first || now_ns() < first)
        return;
    for (struct op *o = self.ops; o; o = o->next) {
        if (!has_deadline(o) || now_ns() < o->deadline)
            continue;
        if (o->exited) { /* it had ended before; its output is still being fetched */
            o->deadline = 0;
            continue;
        }
        o->reason = R_TIMED_OUT;
        if (o->kind == OP_DIAL)
            op_fail(o, "deadline_exceeded", 0, "port %d inside: no answer to the connection", o->port);
        else if (o->kind == OP_SHELL)
            chronus_timeout(o);
        else
            kill_tree(o->pid, o->id, o, 0, SIGKILL);
    }
}
