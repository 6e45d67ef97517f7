/* The one connection to the edge. A new one replaces the one before; losing it changes nothing else. */
#include "aether.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

enum { OUT_ROOM = 512 << 10, READ_SIZE = 256 << 10, KEEP_BUFFER = 4096 };

static struct {
    struct source source;
    struct buf in, out;
    bool greeted, open;
} conn = { .source = { .fd = -1 } };
static struct source listener = { .fd = -1 };

static void conn_close(void)
{
    loop_watch(&conn.source, 0);
    fd_close(&conn.source.fd);
    buf_free(&conn.in);
    buf_free(&conn.out);
    conn.open = false;
    op_detach_all();
}

bool conn_room(void)
{
    return conn.open && conn.out.len < OUT_ROOM;
}

void conn_send(uint32_t channel, uint8_t type, uint8_t flags, const void *p, size_t n)
{
    if (conn.open)
        frame_put(&conn.out, channel, type, flags, p, n);
}

void conn_send_u64(uint32_t channel, uint8_t type, uint8_t flags, uint64_t v)
{
    if (conn.open)
        frame_put_u64(&conn.out, channel, type, flags, v);
}

void conn_failure(uint32_t channel, const char *code, int error, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    struct buf b = { 0 };
    mp_array(&b, 3);
    mp_str(&b, code);
    mp_str(&b, text);
    mp_int(&b, error);
    conn_send(channel, F_ERROR, 0, b.p, b.len);
    buf_free(&b);
}

static void write_out(void)
{
    size_t done = 0;
    while (done < conn.out.len) {
        ssize_t n = send(conn.source.fd, conn.out.p + done, conn.out.len - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            break;
        if (n < 0) {
            conn_close();
            return;
        }
        done += (size_t)n;
    }
    buf_drop(&conn.out, done);
}

void conn_flush(void)
{
    if (!conn.open)
        return;
    op_send_all();
    if (conn.out.failed) {
        conn_close(); /* no memory: the edge comes again and attaches */
        return;
    }
    if (conn.out.len)
        write_out();
    if (!conn.open)
        return;
    loop_watch(&conn.source, conn.out.len ? EPOLLIN | EPOLLOUT : EPOLLIN);
    if (!conn.out.len && conn.out.cap > KEEP_BUFFER)
        buf_free(&conn.out);
}

static void say_hello(void)
{
    struct buf b = { 0 };
    mp_array(&b, 5);
    mp_int(&b, PROTOCOL_VERSION);
    mp_int(&b, PROTOCOL_VERSION);
    mp_str(&b, self.cfg.sandbox_id);
    mp_bin(&b, self.instance, sizeof self.instance);
    mp_array(&b, 3);
    mp_str(&b, "exec");
    mp_str(&b, "sessions");
    mp_str(&b, "files");
    conn_send(0, F_HELLO, 0, b.p, b.len);
    buf_free(&b);
}

static bool greeted(const struct frame *f)
{
    struct mp m = { f->payload, f->payload + f->length, false };
    mp_read_array(&m);
    int64_t version = mp_read_int(&m), oldest = mp_read_int(&m);
    if (m.bad)
        return false;
    if (version < PROTOCOL_VERSION || oldest > PROTOCOL_VERSION) {
        conn_failure(0, "version_mismatch", 0, "aether speaks version %d, the edge %lld to %lld",
                     PROTOCOL_VERSION, (long long)oldest, (long long)version);
        write_out();
        return false;
    }
    conn.greeted = true;
    return true;
}

/* Ends the sandbox: what runs gets SIGTERM and the grace, then PID 1 ends, and the kernel kills the rest. */
static void bye(const struct frame *f)
{
    uint32_t grace = 0;
    if (f->length == 4)
        grace = (uint32_t)f->payload[0] | (uint32_t)f->payload[1] << 8 | (uint32_t)f->payload[2] << 16 |
                (uint32_t)f->payload[3] << 24;
    kill(-1, SIGTERM);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    int64_t until = now_ns() + (grace > 60000 ? 60000 : grace) * 1000000LL;
    while (kill(-1, 0) == 0 && now_ns() < until) {
        struct timespec t = { 0, 20000000 };
        sigtimedwait(&set, NULL, &t);
        while (waitpid(-1, NULL, WNOHANG) > 0) {
        }
    }
    loop_end(0);
}

static bool handle(const struct frame *f)
{
    if (!conn.greeted)
        return f->type == F_HELLO && f->channel == 0 && greeted(f);
    switch (f->type) {
    case F_START:
        if (!f->channel || op_by_channel(f->channel))
            return false;
        op_start(f->channel, f->payload, f->length);
        return true;
    case F_ATTACH:
        if (!f->channel || op_by_channel(f->channel))
            return false;
        op_attach(f->channel, f->payload, f->length);
        return true;
    case F_PING:
        if (f->length <= 64)
            conn_send(0, F_PONG, 0, f->payload, f->length);
        return f->length <= 64;
    case F_LIST:
        op_list();
        return true;
    case F_BYE:
        bye(f);
        return true;
    case F_DATA: case F_ACK: case F_EOF: case F_FORGET: case F_SIGNAL: case F_RESIZE:
        return op_frame(f);
    default:
        return false;
    }
}

static void read_in(void)
{
    /* What is there, and no more: an idle aether holds no buffer. */
    int pending = 0;
    if (ioctl(conn.source.fd, FIONREAD, &pending) || pending < 1)
        pending = 1;
    size_t want = pending > READ_SIZE ? READ_SIZE : (size_t)pending;
    if (!buf_reserve(&conn.in, want)) {
        conn_close();
        return;
    }
    ssize_t n = recv(conn.source.fd, conn.in.p + conn.in.len, want, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        conn_close();
        return;
    }
    conn.in.len += n > 0 ? (size_t)n : 0;
    size_t used = 0;
    while (conn.open) {
        struct frame f;
        long size = frame_decode(conn.in.p + used, conn.in.len - used, &f);
        if (size == 0)
            break;
        if (size < 0 || !handle(&f)) {
            conn_close();
            return;
        }
        used += (size_t)size;
    }
    if (!conn.open)
        return;
    buf_drop(&conn.in, used);
    if (!conn.in.len)
        buf_free(&conn.in);
}

static void conn_ready(struct source *s, uint32_t events)
{
    (void)s;
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        read_in();
}

void conn_open(int fd)
{
    if (conn.open)
        conn_close();
    conn.source = (struct source){ .ready = conn_ready, .fd = fd };
    conn.greeted = false;
    conn.open = true;
    loop_watch(&conn.source, EPOLLIN);
    say_hello();
}

static void listener_ready(struct source *s, uint32_t events)
{
    (void)events;
    int fd = accept4(s->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0)
        conn_open(fd);
}

void conn_listen(int fd)
{
    listener = (struct source){ .ready = listener_ready, .fd = fd };
    loop_watch(&listener, EPOLLIN);
}
