/* A connection to a port inside: aether connects in the sandbox's network namespace, to loopback addresses only, and
 * carries bytes both ways. What listens there is hostile; nothing of what it sends is looked at. */
#include "aether.h"

#include <arpa/inet.h>
#include <sys/epoll.h>
#include <sys/socket.h>

static const char *const LOCALHOST[] = { "127.0.0.1", "::1", NULL };

static bool address_of(const char *text, uint16_t port, struct sockaddr_storage *out, socklen_t *size)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)out;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)out;
    memset(out, 0, sizeof *out);
    if (inet_pton(AF_INET, text, &v4->sin_addr) == 1 && (ntohl(v4->sin_addr.s_addr) >> 24) == 127) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        *size = sizeof *v4;
        return true;
    }
    if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr)) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons(port);
        *size = sizeof *v6;
        return true;
    }
    return false;
}

static void connected(struct source *s, uint32_t events);

/* 0: connected, or on its way; else an errno. */
static int try_address(struct op *o, const char *text)
{
    struct sockaddr_storage to;
    socklen_t size;
    if (!address_of(text, (uint16_t)o->port, &to, &size))
        return EINVAL;
    int fd = socket(to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return errno;
    if (connect(fd, (struct sockaddr *)&to, size) && errno != EINPROGRESS) {
        int e = errno;
        close(fd);
        return e;
    }
    o->result_pipe = (struct source){ .ready = connected, .fd = fd };
    loop_watch(&o->result_pipe, EPOLLOUT);
    return 0;
}

/* Goes through the addresses that are left until one is on its way. */
static void next_address(struct op *o, int error)
{
    while (o->addresses && *o->addresses) {
        int e = try_address(o, *o->addresses++);
        if (!e)
            return;
        error = e == EAFNOSUPPORT || e == EADDRNOTAVAIL ? error : e;
    }
    op_fail(o, error == ECONNREFUSED ? "port_refused" : "unavailable", error, "port %d inside: %s", o->port,
            error ? strerror(error) : "no loopback address");
}

static void connected(struct source *s, uint32_t events)
{
    (void)events;
    struct op *o = (struct op *)((char *)s - offsetof(struct op, result_pipe));
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(s->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    int fd = s->fd, other = error ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    loop_watch(s, 0);
    s->fd = -1;
    if (error || other < 0) {
        close(fd);
        next_address(o, error ? error : errno);
        return;
    }
    o->in.fd = fd;
    o->out.fd = other;
    o->deadline = 0;
    op_started(o);
    op_feed(o);
    op_pump(o);
}

void dial_settle(struct op *o)
{
    if (o->ended || o->result_pipe.fd >= 0)
        return;
    if (o->read_error) {
        op_fail(o, "port_reset", o->read_error, "port %d inside: %s", o->port, strerror(o->read_error));
        return;
    }
    if (o->out.fd >= 0)
        return;
    o->streams[S_CONTENT].ended = true;
    if (o->in.fd >= 0)
        return;
    o->ended = o->exited = true;
    mp_array(&o->final, 1);
    mp_bool(&o->final, true);
}

void dial_start(struct op *o, struct mp *m)
{
    char *address = slice_dup(mp_read_bytes(m));
    int64_t port = mp_read_int(m), timeout_ms = mp_read_int(m);
    struct sockaddr_storage to;
    socklen_t size;
    o->single = true;
    o->limit = UINT64_MAX;
    o->out_stream = S_CONTENT;
    o->takes_input = o->input_open = true;
    if (m->bad || !address || port < 1 || port > 65535) {
        op_fail(o, "invalid_argument", 0, "dial: a port from 1 to 65535");
    } else if (*address && !address_of(address, (uint16_t)port, &to, &size)) {
        op_fail(o, "invalid_argument", 0, "dial: only loopback addresses");
    } else {
        o->port = (int)port;
        o->deadline = timeout_ms > 0 ? now_ns() + timeout_ms * 1000000 : 0;
        const char *given[] = { address, NULL };
        o->addresses = *address ? given : LOCALHOST;
        next_address(o, 0);
        o->addresses = *address ? NULL : o->addresses; /* `given` goes */
    }
    free(address);
}
