#include "aether.h"

#include <sys/epoll.h>
#include <time.h>

static int epoll_fd = -1;
static bool ending;
static int end_status;

int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int loop_open(void)
{
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    return epoll_fd < 0 ? -1 : 0;
}

void loop_watch(struct source *s, uint32_t events)
{
    if (s->fd < 0 || s->events == events)
        return;
    struct epoll_event e = { .events = events, .data.ptr = s };
    int op = !s->events ? EPOLL_CTL_ADD : events ? EPOLL_CTL_MOD : EPOLL_CTL_DEL;
    if (epoll_ctl(epoll_fd, op, s->fd, &e) == 0)
        s->events = events;
}

static int timeout_ms(void)
{
    int64_t a = op_next_deadline(), b = chronus_next_deadline();
    int64_t at = !a ? b : !b ? a : a < b ? a : b;
    if (!at)
        return -1;
    int64_t left = at - now_ns();
    if (left <= 0)
        return 0;
    return left > 3600000000000LL ? 3600000 : (int)(left / 1000000 + 1);
}

int loop_run(void)
{
    while (!ending) {
        /* One event a turn: a handler may free the source of the next. */
        struct epoll_event e;
        int n = epoll_wait(epoll_fd, &e, 1, timeout_ms());
        if (n < 0 && errno != EINTR)
            return 73;
        if (n == 1) {
            struct source *s = e.data.ptr;
            s->ready(s, e.events);
        }
        op_check_deadlines();
        chronus_check_deadlines();
        conn_flush();
    }
    return end_status;
}

void loop_end(int status)
{
    ending = true;
    end_status = status;
}

static void sink_ready(struct source *s, uint32_t events)
{
    (void)events;
    static char waste[65536];
    for (int i = 0; i < 16; i++) {
        ssize_t n = read(s->fd, waste, sizeof waste);
        if (n > 0)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        loop_watch(s, 0);
        close(s->fd);
        free(s);
        return;
    }
}

void sink(int fd)
{
    struct source *s = fd >= 0 ? calloc(1, sizeof *s) : NULL;
    if (!s) {
        if (fd >= 0)
            close(fd);
        return;
    }
    *s = (struct source){ .ready = sink_ready, .fd = fd };
    loop_watch(s, EPOLLIN);
}
