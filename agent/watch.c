/* Watch: inotify, with directories that come later when the watch is recursive. */
#include "worker.h"

#include <dirent.h>
#include <stdio.h>
#include <sys/inotify.h>

enum { MOST_WATCHES = 8192 };

static struct {
    char *paths[MOST_WATCHES];
    int fd, most;
    bool recursive;
} watches;

static const uint32_t EVENTS = IN_CREATE | IN_MODIFY | IN_CLOSE_WRITE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB |
                               IN_DELETE_SELF | IN_MOVE_SELF;

static int tell(const struct worker *w, const char *event, const char *path)
{
    struct buf b = { 0 };
    mp_array(&b, 2);
    mp_str(&b, event);
    mp_bin(&b, path, strlen(path));
    int r = b.failed ? -1 : write_all(w->out, b.p, b.len);
    buf_free(&b);
    return r;
}

static void add(const char *path, int depth);

static void add_children(const char *path, int depth)
{
    DIR *d = depth < 64 ? opendir(path) : NULL;
    for (struct dirent *e; d && (e = readdir(d));) {
        char full[PATH_LIMIT];
        struct stat st;
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") ||
            snprintf(full, sizeof full, "%s/%s", strcmp(path, "/") ? path : "", e->d_name) >= (int)sizeof full)
            continue;
        if (lstat(full, &st) == 0 && S_ISDIR(st.st_mode))
            add(full, depth + 1);
    }
    if (d)
        closedir(d);
}

static void add(const char *path, int depth)
{
    int id = inotify_add_watch(watches.fd, path, EVENTS | (depth ? IN_DONT_FOLLOW : 0));
    if (id < 0 || id >= MOST_WATCHES)
        return;
    free(watches.paths[id]);
    watches.paths[id] = strdup(path);
    if (watches.recursive)
        add_children(path, depth);
}

static const char *name_of(uint32_t mask)
{
    return mask & IN_CREATE ? "created" : mask & (IN_MODIFY | IN_CLOSE_WRITE) ? "modified" :
           mask & (IN_DELETE | IN_DELETE_SELF) ? "removed" : mask & (IN_MOVED_FROM | IN_MOVE_SELF) ? "moved_from" :
           mask & IN_MOVED_TO ? "moved_to" : mask & IN_ATTRIB ? "attrib" : NULL;
}

static int take(const struct worker *w, const struct inotify_event *e)
{
    if (e->mask & IN_Q_OVERFLOW)
        return tell(w, "overflow", "");
    const char *event = name_of(e->mask), *base = e->wd > 0 && e->wd < MOST_WATCHES ? watches.paths[e->wd] : NULL;
    if (!event || !base)
        return 0;
    char full[PATH_LIMIT * 2];
    snprintf(full, sizeof full, e->len ? "%s/%s" : "%s", strcmp(base, "/") || !e->len ? base : "", e->name);
    if (watches.recursive && e->mask & IN_ISDIR && e->mask & (IN_CREATE | IN_MOVED_TO))
        add(full, 1);
    return tell(w, event, full);
}

int watch_path(const struct worker *w, struct mp *m, const char *path)
{
    static char events[64 << 10] __attribute__((aligned(8)));
    watches.recursive = mp_read_bool(m);
    watches.fd = inotify_init1(IN_CLOEXEC);
    struct stat st;
    if (watches.fd < 0)
        return say_failure(w, "resource_exhausted", errno, "watch %s: %s", path, strerror(errno));
    if (stat(path, &st))
        return say_errno(w, errno, "watch", path);
    add(path, 0);
    if (tell(w, "watching", path)) /* from here on nothing is missed */
        return 0;
    for (;;) {
        ssize_t n = read(watches.fd, events, sizeof events);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return 0;
        for (char *p = events; p < events + n;) {
            const struct inotify_event *e = (const struct inotify_event *)p;
            if (take(w, e))
                return 0;
            p += sizeof *e + e->len;
        }
    }
}
