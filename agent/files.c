/* File operations. We run as the acting user, below the sandbox's root: the kernel decides what may be done. */
#include "worker.h"

#include <dirent.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/random.h>

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#endif

static int send_answer(const struct worker *w, uint8_t type, const struct buf *payload)
{
    if (payload->failed || write_all(w->result, &type, 1) || write_all(w->result, payload->p, payload->len))
        return 1;
    return 0;
}

int say_done(const struct worker *w, const struct buf *payload)
{
    return send_answer(w, F_RESULT, payload);
}

int say_failure(const struct worker *w, const char *code, int error, const char *format, ...)
{
    char text[PATH_LIMIT + 256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    struct buf b = { 0 };
    mp_array(&b, 3);
    mp_str(&b, code);
    mp_str(&b, text);
    mp_int(&b, error);
    int r = send_answer(w, F_ERROR, &b);
    buf_free(&b);
    return r;
}

int say_errno(const struct worker *w, int error, const char *what, const char *path)
{
    const char *code = "file_error";
    switch (error) {
    case ENOENT: code = "file_not_found"; break;
    case EEXIST: code = "file_exists"; break;
    case ENOTDIR: code = "not_a_directory"; break;
    case EISDIR: code = "is_a_directory"; break;
    case ENOTEMPTY: code = "directory_not_empty"; break;
    case EACCES: case EPERM: case EROFS: code = "file_access_denied"; break;
    case ENOSPC: case EDQUOT: code = "disk_full"; break;
    case ENOMEM: code = "out_of_memory"; break;
    case ELOOP: case ENAMETOOLONG: case EINVAL: case EILSEQ: code = "path_invalid"; break;
    case EFBIG: code = "payload_too_large"; break;
    default: break;
    }
    return say_failure(w, code, error, "%s %s: %s", what, path, strerror(error));
}

/* --- helpers --- */

static int64_t copy_plain(int from, int to, int64_t most, int64_t done)
{
    static char chunk[COPY_CHUNK];
    while (most < 0 || done < most) {
        size_t want = most >= 0 && most - done < COPY_CHUNK ? (size_t)(most - done) : COPY_CHUNK;
        ssize_t n = read(from, chunk, want);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        if (n == 0)
            break;
        if (write_all(to, chunk, (size_t)n))
            return -1;
        done += n;
    }
    return done;
}

int64_t move_bytes(int from, int to, int64_t most)
{
    int64_t done = 0;
    while (most < 0 || done < most) {
        size_t want = most >= 0 && most - done < COPY_CHUNK ? (size_t)(most - done) : COPY_CHUNK;
        ssize_t n = splice(from, NULL, to, NULL, want, SPLICE_F_MOVE | SPLICE_F_MORE);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EINVAL) /* neither is a pipe, or the file system cannot */
            return copy_plain(from, to, most, done);
        if (n < 0)
            return -1;
        if (n == 0)
            break;
        done += n;
    }
    return done;
}

int make_parents(char *path)
{
    for (char *p = path + 1; (p = strchr(p, '/')) != NULL; p++) {
        *p = 0;
        int r = mkdir(path, 0755);
        *p = '/';
        if (r && errno != EEXIST)
            return -1;
    }
    return 0;
}

static const char *type_of(mode_t mode)
{
    switch (mode & S_IFMT) {
    case S_IFREG: return "file";
    case S_IFDIR: return "directory";
    case S_IFLNK: return "symlink";
    case S_IFIFO: return "fifo";
    case S_IFSOCK: return "socket";
    case S_IFCHR: return "char";
    default: return "block";
    }
}

static int64_t nanoseconds(const struct timespec *t)
{
    return t->tv_sec * 1000000000LL + t->tv_nsec;
}

static void put_owner_names(struct buf *b, const struct stat *st)
{
    static char user[64], group[64];
    static unsigned uid = UINT_MAX, gid = UINT_MAX;
    if (st->st_uid != uid)
        name_of_id("/etc/passwd", uid = st->st_uid, user);
    if (st->st_gid != gid)
        name_of_id("/etc/group", gid = st->st_gid, group);
    mp_str(b, user);
    mp_str(b, group);
}

void put_stat(struct buf *b, const char *path, const struct stat *st, const char *target)
{
    mp_array(b, 14);
    mp_bin(b, path, strlen(path));
    mp_str(b, type_of(st->st_mode));
    mp_int(b, st->st_size);
    mp_int(b, st->st_mode & 07777);
    mp_int(b, st->st_uid);
    mp_int(b, st->st_gid);
    mp_int(b, nanoseconds(&st->st_mtim));
    mp_int(b, nanoseconds(&st->st_atim));
    mp_int(b, nanoseconds(&st->st_ctim));
    mp_int(b, (int64_t)st->st_ino);
    mp_int(b, (int64_t)st->st_nlink);
    mp_bin(b, target, strlen(target));
    put_owner_names(b, st);
}

static int say_stat(const struct worker *w, const char *path, const struct stat *st)
{
    char target[PATH_LIMIT] = "";
    if (S_ISLNK(st->st_mode)) {
        ssize_t n = readlink(path, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
    }
    struct buf b = { 0 };
    mp_array(&b, 1);
    put_stat(&b, path, st, target);
    int r = say_done(w, &b);
    buf_free(&b);
    return r;
}

static int say_ok(const struct worker *w)
{
    struct buf b = { 0 };
    mp_array(&b, 1);
    mp_bool(&b, true);
    int r = say_done(w, &b);
    buf_free(&b);
    return r;
}

static int say_path(const struct worker *w, const char *path)
{
    struct stat st;
    return lstat(path, &st) ? say_errno(w, errno, "stat", path) : say_stat(w, path, &st);
}

int resolve_owner(const char *spec, uid_t *uid, gid_t *gid)
{
    struct identity who;
    int e = find_identity(spec, &who);
    *uid = who.uid;
    *gid = who.gid;
    return e;
}

/* --- reading --- */

static int open_regular(const struct worker *w, const char *path, struct stat *st, int *fd)
{
    *fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (*fd < 0)
        return say_errno(w, errno, "open", path), 1;
    if (fstat(*fd, st))
        return say_errno(w, errno, "stat", path), 1;
    if (S_ISDIR(st->st_mode))
        return say_errno(w, EISDIR, "read", path), 1;
    if (!S_ISREG(st->st_mode))
        return say_failure(w, "file_error", 0, "read %s: a %s, not a file", path, type_of(st->st_mode)), 1;
    return 0;
}

static int read_file(const struct worker *w, struct mp *m, const char *path)
{
    int64_t offset = mp_read_int(m), length = mp_read_int(m);
    struct stat st;
    int fd;
    if (m->bad || offset < 0)
        return say_failure(w, "invalid_argument", 0, "read %s: a negative offset", path);
    if (open_regular(w, path, &st, &fd))
        return 0;
    if (offset && lseek(fd, offset, SEEK_SET) < 0)
        return say_errno(w, errno, "seek in", path);
    if (move_bytes(fd, w->out, length) < 0)
        return say_errno(w, errno, "read", path);
    return say_stat(w, path, &st);
}

/* --- writing --- */

struct target {
    char path[PATH_LIMIT], dir[PATH_LIMIT], beside[PATH_LIMIT];
    bool exists, named;
    struct stat st;
    int fd;
};

static int find_target(struct target *t, const char *path)
{
    /* A link is written through, not replaced. */
    char *real = realpath(path, NULL);
    snprintf(t->path, sizeof t->path, "%s", real ? real : path);
    free(real);
    t->exists = stat(t->path, &t->st) == 0;
    const char *slash = strrchr(t->path, '/');
    int n = slash > t->path ? (int)(slash - t->path) : 1;
    snprintf(t->dir, sizeof t->dir, "%.*s", n, t->path);
    if (t->exists && S_ISDIR(t->st.st_mode))
        return EISDIR;
    if (slash && !slash[1])
        return EISDIR;
    return t->exists && !S_ISREG(t->st.st_mode) ? ENXIO : 0;
}

static int name_beside(struct target *t)
{
    uint64_t r = 0;
    if (getrandom(&r, sizeof r, 0) != sizeof r)
        return -1;
    int n = snprintf(t->beside, sizeof t->beside, "%s/.dsec-%016llx", t->dir, (unsigned long long)r);
    if (n >= (int)sizeof t->beside) {
        errno = ENAMETOOLONG;
        return -1;
    }
    return 0;
}

/* With no name where the file system can, so that nothing is left if we are killed. */
static int open_beside(struct target *t)
{
    t->fd = open(t->dir, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (t->fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT))
        return t->fd < 0 ? -1 : 0;
    if (name_beside(t))
        return -1;
    t->fd = open(t->beside, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    t->named = t->fd >= 0;
    return t->fd < 0 ? -1 : 0;
}

static int put_in_place(struct target *t)
{
    if (t->named)
        return rename(t->beside, t->path);
    char link_path[64];
    snprintf(link_path, sizeof link_path, "/proc/self/fd/%d", t->fd);
    if (!t->exists) {
        if (linkat(AT_FDCWD, link_path, AT_FDCWD, t->path, AT_SYMLINK_FOLLOW) == 0)
            return 0;
        if (errno != EEXIST)
            return -1;
    }
    if (name_beside(t) || linkat(AT_FDCWD, link_path, AT_FDCWD, t->beside, AT_SYMLINK_FOLLOW))
        return -1;
    t->named = true;
    return rename(t->beside, t->path);
}

static int dress(const struct target *t, int64_t mode, const char *owner, int64_t mtime)
{
    mode_t mask = umask(0);
    mode_t bits = mode >= 0 ? (mode_t)mode & 07777 : t->exists ? t->st.st_mode & 07777 : 0644 & ~mask;
    uid_t uid = t->exists ? t->st.st_uid : (uid_t)-1;
    gid_t gid = t->exists ? t->st.st_gid : (gid_t)-1;
    umask(mask);
    if (*owner) {
        int e = resolve_owner(owner, &uid, &gid);
        if (e || fchown(t->fd, uid, gid))
            return e ? e : errno;
    } else if (t->exists && fchown(t->fd, uid, gid) && errno != EPERM) {
        return errno;
    }
    if (fchmod(t->fd, bits))
        return errno;
    struct timespec times[2] = { { 0, UTIME_NOW }, { mtime / 1000000000, mtime % 1000000000 } };
    return mtime >= 0 && futimens(t->fd, times) ? errno : 0;
}

static int take_content(const struct worker *w, int fd, int64_t limit)
{
    int64_t n = move_bytes(w->in, fd, limit >= 0 ? limit : -1);
    char one;
    if (n < 0)
        return errno;
    return limit >= 0 && n == limit && read(w->in, &one, 1) > 0 ? EFBIG : 0;
}

static int append_file(const struct worker *w, struct target *t, int64_t mode, int64_t limit)
{
    int fd = open(t->path, O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, mode >= 0 ? (mode_t)mode & 07777 : 0644);
    off_t end = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
    if (end < 0)
        return say_errno(w, errno, "append to", t->path);
    int e = take_content(w, fd, limit);
    if (e) {
        if (ftruncate(fd, end)) {
            /* What was added stays; the error that is told is the first. */
        }
        return say_errno(w, e, "append to", t->path);
    }
    return say_path(w, t->path);
}

static int write_file(const struct worker *w, struct mp *m, char *path)
{
    int64_t mode = mp_read_int(m);
    char *owner = slice_dup(mp_read_bytes(m));
    int64_t mtime = mp_read_int(m);
    bool parents = mp_read_bool(m), append = mp_read_bool(m);
    int64_t limit = mp_read_int(m);
    static struct target t = { .fd = -1 };
    if (m->bad || !owner)
        return say_failure(w, "invalid_argument", 0, "write_file: not such a request");
    if (parents && make_parents(path))
        return say_errno(w, errno, "make parents of", path);
    int e = find_target(&t, path);
    if (e == ENXIO)
        return say_failure(w, "file_error", 0, "write %s: a %s, not a file", path, type_of(t.st.st_mode));
    if (e)
        return say_errno(w, e, "write", path);
    if (append)
        return append_file(w, &t, mode, limit);
    if (t.exists && access(t.path, W_OK))
        return say_errno(w, errno, "write", path);
    if (open_beside(&t))
        return say_errno(w, errno, "write", path);
    e = take_content(w, t.fd, limit);
    if (!e)
        e = dress(&t, mode, owner, mtime);
    if (!e && put_in_place(&t))
        e = errno;
    if (e && t.named)
        unlink(t.beside);
    if (e == EFBIG)
        return say_failure(w, "payload_too_large", 0, "write %s: more than %lld bytes", path, (long long)limit);
    return e ? say_errno(w, e, "write", path) : say_path(w, t.path);
}

/* --- directories --- */

struct listing {
    struct buf entries;
    uint32_t count;
    int64_t limit;
    bool truncated;
};

static void list_into(struct listing *l, int fd, const char *path, int64_t depth)
{
    DIR *dir = fdopendir(fd);
    if (!dir) {
        close(fd);
        return;
    }
    for (struct dirent *d; !l->truncated && (d = readdir(dir));) {
        char full[PATH_LIMIT * 2], target[PATH_LIMIT] = "";
        struct stat st;
        if (!strcmp(d->d_name, ".") || !strcmp(d->d_name, "..") || fstatat(dirfd(dir), d->d_name, &st, AT_SYMLINK_NOFOLLOW))
            continue;
        if (l->count >= l->limit || l->entries.len > LISTING_LIMIT - 2 * PATH_LIMIT) {
            l->truncated = true;
            break;
        }
        snprintf(full, sizeof full, "%s/%s", strcmp(path, "/") ? path : "", d->d_name);
        if (S_ISLNK(st.st_mode)) {
            ssize_t n = readlinkat(dirfd(dir), d->d_name, target, sizeof target - 1);
            target[n > 0 ? n : 0] = 0;
        }
        put_stat(&l->entries, full, &st, target);
        l->count++;
        if (depth > 1 && S_ISDIR(st.st_mode) && strlen(full) < PATH_LIMIT) {
            int sub = openat(dirfd(dir), d->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (sub >= 0)
                list_into(l, sub, full, depth - 1);
        }
    }
    closedir(dir);
}

static int list_dir(const struct worker *w, struct mp *m, const char *path)
{
    int64_t depth = mp_read_int(m);
    struct listing l = { .limit = mp_read_int(m) };
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return say_errno(w, errno, "list", path);
    list_into(&l, fd, path, depth > 64 ? 64 : depth);
    struct buf b = { 0 };
    mp_array(&b, 2);
    mp_array(&b, l.count);
    buf_put(&b, l.entries.p, l.entries.len);
    mp_bool(&b, l.truncated);
    return say_done(w, &b);
}

static int make_dir(const struct worker *w, struct mp *m, char *path)
{
    int64_t mode = mp_read_int(m);
    bool parents = mp_read_bool(m);
    struct stat st;
    if (parents && make_parents(path))
        return say_errno(w, errno, "make parents of", path);
    if (mkdir(path, 0777) == 0) {
        if (mode >= 0 && chmod(path, (mode_t)mode & 07777))
            return say_errno(w, errno, "mkdir", path);
    } else if (!(errno == EEXIST && parents && stat(path, &st) == 0 && S_ISDIR(st.st_mode))) {
        return say_errno(w, errno, "mkdir", path);
    }
    return say_path(w, path);
}

int remove_tree(int dir, const char *name)
{
    if (unlinkat(dir, name, 0) == 0)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return -1;
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    if (!d)
        return -1;
    int failed = 0;
    for (struct dirent *e; (e = readdir(d)) != NULL;)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..") && remove_tree(dirfd(d), e->d_name))
            failed = errno;
    closedir(d);
    if (failed) {
        errno = failed;
        return -1;
    }
    return unlinkat(dir, name, AT_REMOVEDIR);
}

static int remove_path(const struct worker *w, struct mp *m, const char *path)
{
    bool recursive = mp_read_bool(m), missing_ok = mp_read_bool(m);
    struct stat st;
    if (lstat(path, &st))
        return errno == ENOENT && missing_ok ? say_ok(w) : say_errno(w, errno, "remove", path);
    int r = !S_ISDIR(st.st_mode) ? unlink(path) : recursive ? remove_tree(AT_FDCWD, path) : rmdir(path);
    return r ? say_errno(w, errno, "remove", path) : say_ok(w);
}

/* --- moving: an overlay refuses to rename a directory of a layer, and file systems differ --- */

static int copy_tree(const char *from, const char *to);

static int copy_children(const char *from, const char *to)
{
    DIR *d = opendir(from);
    int failed = d ? 0 : errno;
    for (struct dirent *e; d && !failed && (e = readdir(d));) {
        char a[PATH_LIMIT], b[PATH_LIMIT];
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
            continue;
        if (snprintf(a, sizeof a, "%s/%s", from, e->d_name) >= (int)sizeof a ||
            snprintf(b, sizeof b, "%s/%s", to, e->d_name) >= (int)sizeof b)
            failed = ENAMETOOLONG;
        else if (copy_tree(a, b))
            failed = errno;
    }
    if (d)
        closedir(d);
    errno = failed;
    return failed ? -1 : 0;
}

static int copy_regular(const char *from, const char *to)
{
    int in = open(from, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    int out = in < 0 ? -1 : open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int64_t n = out < 0 ? -1 : move_bytes(in, out, -1);
    int e = errno;
    fd_close(&in);
    fd_close(&out);
    errno = e;
    return n < 0 ? -1 : 0;
}

static int copy_tree(const char *from, const char *to)
{
    struct stat st;
    char target[PATH_LIMIT];
    if (lstat(from, &st))
        return -1;
    int r;
    if (S_ISDIR(st.st_mode)) {
        r = mkdir(to, 0700) || copy_children(from, to) ? -1 : 0;
    } else if (S_ISLNK(st.st_mode)) {
        ssize_t n = readlink(from, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        r = n < 0 ? -1 : symlink(target, to);
    } else if (S_ISREG(st.st_mode)) {
        r = copy_regular(from, to);
    } else {
        r = mknod(to, st.st_mode, st.st_rdev);
    }
    if (r)
        return -1;
    struct timespec times[2] = { st.st_atim, st.st_mtim };
    if (lchown(to, st.st_uid, st.st_gid) && errno != EPERM)
        return -1;
    if (!S_ISLNK(st.st_mode) && chmod(to, st.st_mode & 07777))
        return -1;
    return utimensat(AT_FDCWD, to, times, AT_SYMLINK_NOFOLLOW);
}

static int move_by_copy(const char *from, const char *to, bool overwrite)
{
    char beside[PATH_LIMIT];
    if (snprintf(beside, sizeof beside, "%s.dsec-moving", to) >= (int)sizeof beside) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int r = copy_tree(from, beside);
    if (!r)
        r = (int)syscall(SYS_renameat2, AT_FDCWD, beside, AT_FDCWD, to, overwrite ? 0 : RENAME_NOREPLACE);
    int e = errno;
    if (r)
        remove_tree(AT_FDCWD, beside);
    errno = e;
    return r ? -1 : remove_tree(AT_FDCWD, from);
}

static int move_path(const struct worker *w, struct mp *m, const char *path, const char *to)
{
    bool overwrite = mp_read_bool(m);
    int r = (int)syscall(SYS_renameat2, AT_FDCWD, path, AT_FDCWD, to, overwrite ? 0 : RENAME_NOREPLACE);
    if (r && errno == EXDEV)
        r = move_by_copy(path, to, overwrite);
    return r ? say_errno(w, errno, "move", errno == EEXIST ? to : path) : say_path(w, to);
}

/* --- the door --- */

static char *read_path(struct mp *m)
{
    struct slice s = mp_read_bytes(m);
    if (m->bad || !s.n || s.n >= PATH_LIMIT || s.p[0] != '/')
        return NULL;
    return slice_dup(s);
}

int worker_main(const char *kind, const uint8_t *payload, size_t n, int in, int out, int result)
{
    struct worker w = { in, out, result };
    struct mp m = { payload, payload + n, false };
    mp_read_array(&m);
    mp_skip(&m);
    mp_skip(&m);
    char *path = read_path(&m), *target = path;
    if (path && !strcmp(kind, "move"))
        target = read_path(&m);
    mp_skip(&m); /* the user: we are that user already */
    if (!path || !target || m.bad)
        return say_failure(&w, "path_invalid", 0, "%s: a path is absolute, shorter than %d bytes and holds no NUL", kind, PATH_LIMIT);
    struct stat st;
    if (!strcmp(kind, "read_file"))
        return read_file(&w, &m, path);
    if (!strcmp(kind, "write_file"))
        return write_file(&w, &m, path);
    if (!strcmp(kind, "list_dir"))
        return list_dir(&w, &m, path);
    if (!strcmp(kind, "stat") && mp_read_bool(&m))
        return stat(path, &st) ? say_errno(&w, errno, "stat", path) : say_stat(&w, path, &st);
    if (!strcmp(kind, "stat"))
        return say_path(&w, path);
    if (!strcmp(kind, "mkdir"))
        return make_dir(&w, &m, path);
    if (!strcmp(kind, "move"))
        return move_path(&w, &m, path, target);
    if (!strcmp(kind, "remove"))
        return remove_path(&w, &m, path);
    if (!strcmp(kind, "watch"))
        return watch_path(&w, &m, path);
    if (!strcmp(kind, "put_tree"))
        return put_tree(&w, &m, path);
    return get_tree(&w, &m, path);
}
