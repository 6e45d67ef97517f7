/* The processes of a command, found in our own procfs. What /proc says of hostile processes is bounded and parsed with care. */
#include "aether.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>

struct entry {
    pid_t pid, parent;
    int64_t start;
    bool chosen;
};

static ssize_t read_proc(const char *name, char *out, size_t n)
{
    int fd = openat(self.proc, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t r = read(fd, out, n - 1);
    close(fd);
    if (r >= 0)
        out[r] = 0;
    return r;
}

/* The name in a stat line may hold anything: the last ')' ends it. */
static bool read_stat(pid_t pid, struct entry *e)
{
    char name[32], text[1024];
    snprintf(name, sizeof name, "%d/stat", pid);
    if (read_proc(name, text, sizeof text) <= 0)
        return false;
    char *p = strrchr(text, ')');
    char state;
    int parent;
    unsigned long long start;
    if (!p || sscanf(p + 1, " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                     &state, &parent, &start) != 3)
        return false;
    if (state == 'Z' || state == 'X')
        return false;
    *e = (struct entry){ .pid = pid, .parent = parent, .start = (int64_t)start };
    return true;
}

/* The kernel tells start times in hundredths of a second; within one, pids tell the order. */
void mark_start(struct op *o)
{
    struct timespec t;
    char text[128];
    clock_gettime(CLOCK_BOOTTIME, &t);
    o->start_ticks = t.tv_sec * 100LL + t.tv_nsec / 10000000;
    o->last_pid = 0;
    if (read_proc("loadavg", text, sizeof text) > 0) {
        char *space = strrchr(text, ' ');
        o->last_pid = space ? atoi(space) : 0;
    }
    o->oom_before = oom_kills();
}

static bool begun_by(const struct entry *e, const struct op *o)
{
    return !o || e->start > o->start_ticks || (e->start == o->start_ticks && e->pid > o->last_pid);
}

static bool carries(pid_t pid, const char *marker)
{
    char name[32];
    static char text[128 << 10];
    snprintf(name, sizeof name, "%d/environ", pid);
    ssize_t n = read_proc(name, text, sizeof text);
    for (char *p = text; n > 0 && p < text + n; p += strlen(p) + 1)
        if ((!strncmp(p, "DSEC_OP=", 8) && !strcmp(p + 8, marker)) ||
            (!strncmp(p, "DSEC_SESSION=", 13) && !strcmp(p + 13, marker)))
            return true;
    return false;
}

static size_t list_processes(struct entry **out)
{
    size_t n = 0, cap = 0;
    int fd = openat(self.proc, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    *out = NULL;
    for (struct dirent *d; dir && (d = readdir(dir));) {
        pid_t pid = atoi(d->d_name);
        struct entry e;
        if (pid <= 1 || !read_stat(pid, &e))
            continue;
        if (n == cap) {
            struct entry *more = realloc(*out, (cap = cap ? 2 * cap : 64) * sizeof *more);
            if (!more)
                break;
            *out = more;
        }
        (*out)[n++] = e;
    }
    if (dir)
        closedir(dir);
    return n;
}

static void choose(struct entry *all, size_t n, pid_t root, const char *marker, const struct op *o)
{
    for (size_t i = 0; i < n; i++)
        all[i].chosen = all[i].pid == root ||
                        (all[i].parent == 1 && begun_by(&all[i], o) && carries(all[i].pid, marker));
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < n && !all[i].chosen; j++)
                if (all[j].chosen && all[i].parent == all[j].pid)
                    all[i].chosen = more = true;
    }
}

static int kill_once(pid_t root, const char *marker, const struct op *o, pid_t spare, int sig)
{
    struct entry *all;
    int killed = 0;
    size_t n = list_processes(&all);
    choose(all, n, root, marker, o);
    for (size_t i = 0; i < n; i++)
        if (all[i].chosen && all[i].pid != spare && begun_by(&all[i], o) && kill(all[i].pid, sig) == 0)
            killed++;
    free(all);
    return killed;
}

int kill_tree(pid_t root, const char *marker, const struct op *o, pid_t spare, int sig)
{
    int killed = 0;
    /* Those that fork while we look are found on the next round; the limit on processes bounds them. */
    for (int round = 0; round < (sig == SIGKILL ? 64 : 1); round++) {
        int now = kill_once(root, marker, o, spare, sig);
        killed += now;
        if (!now)
            break;
    }
    return killed;
}

int64_t oom_kills(void)
{
    char text[512];
    if (self.cfg.oom_counter < 0)
        return 0;
    ssize_t n = pread(self.cfg.oom_counter, text, sizeof text - 1, 0);
    if (n <= 0)
        return 0;
    text[n] = 0;
    char *p = strstr(text, "oom_kill ");
    return p ? strtoll(p + 9, NULL, 10) : 0;
}
