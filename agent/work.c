/* File operations run in a worker: a child of the acting user, so that the kernel checks permissions and
 * nothing hostile (a FIFO, a file system that hangs) can stop the loop. */
#include "aether.h"

#include <signal.h>
#include <sys/epoll.h>

enum { PIPE_SIZE = 1 << 20 };

struct job {
    const char *kind;
    const uint8_t *payload;
    size_t n;
    int in, out, result;
};

/* A worker is no new program: what aether holds open, it would hold too. It keeps its own three descriptors. */
static int run(void *arg)
{
    struct job *j = arg;
    int *kept[3] = { &j->in, &j->out, &j->result };
    for (int i = 0; i < 3; i++)
        if (*kept[i] >= 0)
            *kept[i] = fcntl(*kept[i], F_DUPFD_CLOEXEC, 16);
    for (int i = 0; i < 3; i++)
        if (*kept[i] >= 0) {
            dup2(*kept[i], i);
            *kept[i] = i;
        }
    syscall(SYS_close_range, 3, ~0U, 0);
    return worker_main(j->kind, j->payload, j->n, j->in, j->out, j->result);
}

static void result_ready(struct source *s, uint32_t events)
{
    (void)events;
    struct op *o = (struct op *)((char *)s - offsetof(struct op, result_pipe));
    for (;;) {
        if (o->work_result.len > FRAME_MAX || !buf_reserve(&o->work_result, 4096)) {
            kill(o->pid, SIGKILL);
            break;
        }
        ssize_t n = read(s->fd, o->work_result.p + o->work_result.len, o->work_result.cap - o->work_result.len);
        if (n > 0) {
            o->work_result.len += (size_t)n;
            continue;
        }
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        break;
    }
    loop_watch(s, 0);
    fd_close(&s->fd);
    op_pump(o);
}

/* The acting user is the third text of a request, the fourth of `move`. */
static char *user_of(const char *kind, const uint8_t *payload, size_t n)
{
    struct mp m = { payload, payload + n, false };
    mp_read_array(&m);
    int before = strcmp(kind, "move") ? 3 : 4; /* the tag, the id, the path; of a move its target too */
    for (int i = 0; i < before; i++)
        mp_skip(&m);
    return slice_dup(mp_read_bytes(&m));
}

static bool channels(int pair[2], int *ours, int ours_end, bool wanted)
{
    pair[0] = pair[1] = -1;
    if (!wanted)
        return true;
    if (pipe2(pair, O_CLOEXEC))
        return false;
    fcntl(pair[0], F_SETPIPE_SZ, PIPE_SIZE);
    *ours = pair[ours_end];
    fcntl(*ours, F_SETFL, O_NONBLOCK);
    return true;
}

void work_start(struct op *o, const char *kind, const uint8_t *payload, size_t n)
{
    bool takes = !strcmp(kind, "write_file") || !strcmp(kind, "put_tree");
    bool gives = !strcmp(kind, "read_file") || !strcmp(kind, "get_tree") || !strcmp(kind, "watch");
    struct identity who;
    char *user = user_of(kind, payload, n);
    if (!user || find_identity(user, &who)) {
        op_fail(o, "user_not_found", ENOENT, "the image has no user or group %s", user ? user : "?");
        free(user);
        return;
    }
    free(user);
    int in[2], out[2], result[2];
    o->result_pipe.ready = result_ready;
    o->single = true;
    o->limit = UINT64_MAX;
    o->out_stream = gives ? S_CONTENT : S_STDOUT;
    bool ok = channels(in, &o->in.fd, 1, takes) && channels(out, &o->out.fd, 0, gives) &&
              channels(result, &o->result_pipe.fd, 0, true);
    struct job job = { kind, payload, n, in[0], out[1], result[1] };
    o->pid = ok ? spawn_worker(&who, run, &job) : -1;
    int e = errno;
    fd_close(&in[0]);
    fd_close(&out[1]);
    fd_close(&result[1]);
    if (o->pid < 0) {
        op_fail(o, "resource_exhausted", e, "%s: no worker: %s", kind, strerror(e));
        return;
    }
    o->takes_input = o->input_open = takes;
    loop_watch(&o->result_pipe, EPOLLIN);
    op_started(o);
    op_pump(o);
}
