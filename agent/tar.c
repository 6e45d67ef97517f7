/* Trees as tar streams. In: ustar, pax, GNU long names; an entry may not leave the target, whatever links an agent
 * puts in its way meanwhile. Out: pax where ustar does not reach. */
#include "worker.h"

#include <dirent.h>
#include <stdio.h>
#include <sys/sysmacros.h>

enum { BLOCK = 512, LONG_LIMIT = 64 << 10, MOST_LINKS = 65536 };

struct header {
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], sum[8], type, link[100], magic[8], user[32],
        group[32], major[8], minor[8], prefix[155], pad[12];
};
_Static_assert(sizeof(struct header) == BLOCK, "a tar header is one block");

/* --- in --- */

struct entry {
    char *name, *link;
    char type;
    int64_t size, mode, uid, gid, mtime_s, mtime_ns;
};

struct unpack {
    const struct worker *w;
    int root;
    int64_t entries, bytes, most_bytes, most_entries, taken;
    bool keep_owner, set_owner;
    uid_t uid;
    gid_t gid;
    struct entry pending; /* what pax and GNU headers said of the next entry */
    bool has_size, has_uid, has_gid, has_mtime;
};

static int read_whole(int fd, void *data, size_t n)
{
    char *p = data;
    size_t done = 0;
    while (done < n) {
        ssize_t r = read(fd, p + done, n - done);
        if (r < 0 && errno == EINTR)
            continue;
        if (r <= 0)
            break;
        done += (size_t)r;
    }
    return done == n ? 0 : done ? -1 : 1;
}

static int skip(int fd, int64_t n)
{
    static char waste[64 << 10];
    while (n > 0) {
        size_t want = n < (int64_t)sizeof waste ? (size_t)n : sizeof waste;
        if (read_whole(fd, waste, want))
            return -1;
        n -= (int64_t)want;
    }
    return 0;
}

static int64_t padding(int64_t n)
{
    return (BLOCK - n % BLOCK) % BLOCK;
}

/* Octal, or GNU's base 256. -1: neither. */
static int64_t number(const char *p, size_t n)
{
    uint64_t v = 0;
    if ((uint8_t)p[0] == 0x80) {
        for (size_t i = 1; i < n; i++) {
            if (v >> 55)
                return -1;
            v = v << 8 | (uint8_t)p[i];
        }
        return (int64_t)v;
    }
    size_t i = 0;
    while (i < n && p[i] == ' ')
        i++;
    for (; i < n && p[i] >= '0' && p[i] <= '7'; i++)
        v = v << 3 | (uint64_t)(p[i] - '0');
    return i < n && p[i] && p[i] != ' ' ? -1 : (int64_t)v;
}

static bool sum_is_right(const struct header *h)
{
    unsigned sum = 0;
    const uint8_t *p = (const uint8_t *)h;
    for (size_t i = 0; i < BLOCK; i++)
        sum += i >= offsetof(struct header, sum) && i < offsetof(struct header, sum) + 8 ? ' ' : p[i];
    return (int64_t)sum == number(h->sum, sizeof h->sum);
}

static char *read_text(int fd, int64_t size)
{
    if (size < 0 || size > LONG_LIMIT)
        return NULL;
    char *text = malloc((size_t)size + 1);
    if (!text || (size && read_whole(fd, text, (size_t)size)) || skip(fd, padding(size))) {
        free(text);
        return NULL;
    }
    text[size] = 0;
    return text;
}

static void set_text(char **where, const char *p, size_t n)
{
    free(*where);
    *where = strndup(p, n);
}

static bool pax_record(struct unpack *u, const char *key, const char *value, size_t n)
{
    struct entry *e = &u->pending;
    if (!strcmp(key, "path")) {
        set_text(&e->name, value, n);
    } else if (!strcmp(key, "linkpath")) {
        set_text(&e->link, value, n);
    } else if (!strcmp(key, "size")) {
        e->size = strtoll(value, NULL, 10);
        u->has_size = true;
        return e->size >= 0;
    } else if (!strcmp(key, "uid")) {
        e->uid = strtoll(value, NULL, 10);
        u->has_uid = true;
    } else if (!strcmp(key, "gid")) {
        e->gid = strtoll(value, NULL, 10);
        u->has_gid = true;
    } else if (!strcmp(key, "mtime")) {
        char *dot;
        e->mtime_s = strtoll(value, &dot, 10);
        e->mtime_ns = 0;
        if (*dot == '.')
            for (int i = 1, scale = 100000000; scale && dot[i] >= '0' && dot[i] <= '9'; i++, scale /= 10)
                e->mtime_ns += (dot[i] - '0') * scale;
        u->has_mtime = true;
    } else if (!strncmp(key, "GNU.sparse", 10)) {
        return false;
    }
    return true;
}

/* "<length> <key>=<value>\n" again and again. */
static bool pax_records(struct unpack *u, char *text, size_t n)
{
    for (char *p = text; p < text + n;) {
        char *space;
        unsigned long length = strtoul(p, &space, 10);
        if (*space != ' ' || length < 5 || length > (size_t)(text + n - p) || p[length - 1] != '\n')
            return false;
        char *key = space + 1, *end = p + length - 1, *eq = memchr(key, '=', (size_t)(end - key));
        if (!eq)
            return false;
        *eq = *end = 0;
        if (!pax_record(u, key, eq + 1, (size_t)(end - eq - 1)))
            return false;
        p += length;
    }
    return true;
}

static void forget_pending(struct unpack *u)
{
    free(u->pending.name);
    free(u->pending.link);
    u->pending = (struct entry){ 0 };
    u->has_size = u->has_uid = u->has_gid = u->has_mtime = false;
}

static bool escapes(const char *name)
{
    for (const char *p = name; p; p = strchr(p, '/')) {
        p += *p == '/';
        if (!strncmp(p, "..", 2) && (!p[2] || p[2] == '/'))
            return true;
    }
    return name[0] == '/';
}

/* Below the target, through no symlink that leads out of it, now or while we look. */
static int open_below(int root, const char *path, int flags)
{
    struct k_open_how how = { .flags = (uint64_t)(flags | O_CLOEXEC), .resolve = K_RESOLVE_IN_ROOT | K_RESOLVE_NO_MAGICLINKS };
    return (int)syscall(SYS_openat2, root, *path ? path : ".", &how, sizeof how);
}

/* The directory that holds `path`, with parents made that the archive does not name. */
static int parent_below(struct unpack *u, char *path, char **base)
{
    char *slash = strrchr(path, '/');
    *base = slash ? slash + 1 : path;
    int up = fcntl(u->root, F_DUPFD_CLOEXEC, 0);
    char *from = path;
    for (char *cut; up >= 0 && slash && from <= slash; from = cut + 1) {
        cut = strchr(from, '/');
        *cut = 0;
        int fd = open_below(u->root, path, O_PATH | O_DIRECTORY);
        if (fd < 0 && errno == ENOENT && (mkdirat(up, from, 0755) == 0 || errno == EEXIST))
            fd = open_below(u->root, path, O_PATH | O_DIRECTORY);
        int e = errno;
        close(up);
        up = fd;
        errno = e;
        *cut = '/';
    }
    return up;
}

static int give_content(struct unpack *u, int fd, const struct entry *e)
{
    int64_t n = move_bytes(u->w->in, fd, e->size);
    if (n < 0)
        return errno;
    u->taken = n;
    return n == e->size ? 0 : ENODATA;
}

static int make_one(struct unpack *u, int dir, const char *base, const struct entry *e, char *link)
{
    struct stat st;
    bool is_dir = e->type == '5';
    if (fstatat(dir, base, &st, AT_SYMLINK_NOFOLLOW) == 0 && !(is_dir && S_ISDIR(st.st_mode)) && remove_tree(dir, base))
        return errno;
    if (is_dir)
        return mkdirat(dir, base, 0700) && errno != EEXIST ? errno : 0;
    if (e->type == '2')
        return symlinkat(link, dir, base) ? errno : 0;
    if (e->type == '6')
        return mkfifoat(dir, base, 0600) ? errno : 0;
    if (e->type == '1') {
        if (escapes(link))
            return EXDEV;
        int from = open_below(u->root, link, O_PATH | O_NOFOLLOW);
        if (from < 0)
            return errno;
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", from);
        int r = linkat(AT_FDCWD, path, dir, base, AT_SYMLINK_FOLLOW) ? errno : 0;
        close(from);
        return r;
    }
    int fd = openat(dir, base, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno;
    int r = give_content(u, fd, e);
    close(fd);
    return r;
}

static int dress(struct unpack *u, int dir, const char *base, const struct entry *e)
{
    struct timespec times[2] = { { 0, UTIME_NOW }, { e->mtime_s, e->mtime_ns } };
    if (e->type == '1')
        return 0;
    if (u->keep_owner && fchownat(dir, base, (uid_t)e->uid, (gid_t)e->gid, AT_SYMLINK_NOFOLLOW))
        return errno;
    if (u->set_owner && fchownat(dir, base, u->uid, u->gid, AT_SYMLINK_NOFOLLOW))
        return errno;
    if (e->type != '2' && fchmodat(dir, base, (mode_t)e->mode & 07777, 0))
        return errno;
    return utimensat(dir, base, times, AT_SYMLINK_NOFOLLOW) ? errno : 0;
}

static int refuse(struct unpack *u, const char *name, const char *why)
{
    return say_failure(u->w, "path_invalid", 0, "entry %s: %s", name, why), -1;
}

static char *trimmed(char *name)
{
    while (!strncmp(name, "./", 2))
        name += 2;
    for (size_t n = strlen(name); n && name[n - 1] == '/'; n--)
        name[n - 1] = 0;
    return name;
}

/* 0: go on; -1: an answer was given. */
static int unpack_one(struct unpack *u, struct entry *e)
{
    char *name = trimmed(e->name), *base;
    if (escapes(name))
        return refuse(u, e->name, "leads out of the target");
    if (e->type != '0' && e->type != '1' && e->type != '2' && e->type != '5' && e->type != '6')
        return refuse(u, name, "is neither file, directory, link nor FIFO");
    if (++u->entries > u->most_entries || (u->bytes += e->type == '0' || !e->type ? e->size : 0) > u->most_bytes)
        return say_failure(u->w, "payload_too_large", 0, "entry %s: the archive is over its limits", name), -1;
    u->taken = 0;
    if (!*name || !strcmp(name, ".")) /* the target itself */
        return skip(u->w->in, e->size + padding(e->size)) ? refuse(u, ".", "is cut off") : 0;
    int dir = parent_below(u, name, &base);
    int error = dir < 0 ? errno : make_one(u, dir, base, e, e->link);
    if (!error)
        error = dress(u, dir, base, e);
    if (dir >= 0)
        close(dir);
    if (error == ENODATA)
        return refuse(u, name, "is cut off");
    if (error == EXDEV)
        return refuse(u, name, "is a link that leads out of the target");
    if (error)
        return say_errno(u->w, error, "unpack", name), -1;
    int64_t left = (e->type == '1' ? 0 : e->size) - u->taken + padding(e->size);
    return left > 0 && skip(u->w->in, left) ? refuse(u, name, "is cut off") : 0;
}

static char *full_name(const struct header *h)
{
    char out[sizeof h->prefix + sizeof h->name + 2];
    bool ustar = !memcmp(h->magic, "ustar\0", 6);
    int prefix = ustar ? (int)strnlen(h->prefix, sizeof h->prefix) : 0;
    snprintf(out, sizeof out, "%.*s%s%.*s", prefix, h->prefix, prefix ? "/" : "", (int)strnlen(h->name, sizeof h->name), h->name);
    return strdup(out);
}

static int next_entry(struct unpack *u, const struct header *h)
{
    int64_t size = number(h->size, sizeof h->size);
    if (!sum_is_right(h) || size < 0)
        return refuse(u, "?", "is no tar header");
    if (h->type == 'x' || h->type == 'g' || h->type == 'L' || h->type == 'K') {
        char *text = read_text(u->w->in, size);
        bool ok = text != NULL;
        if (ok && h->type == 'x')
            ok = pax_records(u, text, (size_t)size);
        else if (ok && h->type == 'L')
            set_text(&u->pending.name, text, strlen(text));
        else if (ok && h->type == 'K')
            set_text(&u->pending.link, text, strlen(text));
        free(text);
        return ok ? 0 : refuse(u, "?", "has an extended header that is damaged, too long, or of a sparse file");
    }
    struct entry e = u->pending;
    u->pending.name = u->pending.link = NULL;
    e.type = h->type ? h->type : '0';
    e.mode = number(h->mode, sizeof h->mode);
    e.size = u->has_size ? e.size : size;
    e.uid = u->has_uid ? e.uid : number(h->uid, sizeof h->uid);
    e.gid = u->has_gid ? e.gid : number(h->gid, sizeof h->gid);
    e.mtime_s = u->has_mtime ? e.mtime_s : number(h->mtime, sizeof h->mtime);
    if (e.type != '0' && e.type != '7' && e.type != '1')
        e.size = 0;
    if (e.type == '7')
        e.type = '0';
    if (!e.name)
        e.name = full_name(h);
    if (!e.link)
        e.link = strndup(h->link, sizeof h->link);
    int r = e.name && e.link && e.mode >= 0 ? unpack_one(u, &e) : refuse(u, "?", "is damaged");
    free(e.name);
    free(e.link);
    forget_pending(u);
    return r;
}

int put_tree(const struct worker *w, struct mp *m, const char *path)
{
    struct unpack u = { .w = w };
    char *owner = slice_dup(mp_read_bytes(m)), *copy = strdup(path);
    u.most_bytes = mp_read_int(m);
    u.most_entries = mp_read_int(m);
    if (m->bad || !owner || !copy)
        return say_failure(w, "invalid_argument", 0, "put_tree: not such a request");
    u.keep_owner = !strcmp(owner, "keep");
    u.set_owner = *owner && !u.keep_owner;
    if (u.set_owner && resolve_owner(owner, &u.uid, &u.gid))
        return say_failure(w, "user_not_found", ENOENT, "the image has no user or group %s", owner);
    if (make_parents(copy) || (mkdir(path, 0755) && errno != EEXIST))
        return say_errno(w, errno, "make", path);
    if ((u.root = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
        return say_errno(w, errno, "open", path);
    struct header h;
    int r, zeros = 0;
    while ((r = read_whole(w->in, &h, BLOCK)) == 0) {
        static const struct header zero;
        if (!memcmp(&h, &zero, BLOCK)) {
            if (++zeros == 2)
                break;
            continue;
        }
        if (next_entry(&u, &h))
            return 0;
    }
    if (r < 0 || (r > 0 && !zeros))
        return refuse(&u, "?", "the archive is cut off"), 0;
    while (read(w->in, &h, BLOCK) > 0) { /* a writer pads to its record size */
    }
    struct buf b = { 0 };
    mp_array(&b, 2);
    mp_int(&b, u.entries);
    mp_int(&b, u.bytes);
    return say_done(w, &b);
}

/* --- out --- */

struct pack {
    const struct worker *w;
    int64_t entries, bytes, most_bytes, most_entries;
    struct {
        dev_t dev;
        ino_t ino;
        char *name;
    } links[MOST_LINKS];
    size_t n_links;
};

static void put_octal(char *out, size_t n, uint64_t v)
{
    for (size_t i = n - 1; i-- > 0; v >>= 3)
        out[i] = (char)('0' + (v & 7));
    out[n - 1] = 0;
}

static void close_header(struct header *h)
{
    memcpy(h->magic, "ustar\00000", 8);
    memset(h->sum, ' ', sizeof h->sum);
    unsigned sum = 0;
    for (size_t i = 0; i < BLOCK; i++)
        sum += ((const uint8_t *)h)[i];
    snprintf(h->sum, 8, "%06o", sum);
}

static void pax_put(struct buf *b, const char *key, const char *value, size_t n)
{
    size_t body = strlen(key) + n + 3, length = body + 1;
    char digits[24];
    while ((size_t)snprintf(digits, sizeof digits, "%zu", length) + body != length)
        length = (size_t)snprintf(digits, sizeof digits, "%zu", length) + body;
    char head[160];
    int k = snprintf(head, sizeof head, "%zu %s=", length, key);
    buf_put(b, head, (size_t)k);
    buf_put(b, value, n);
    buf_put(b, "\n", 1);
}

static int put_block(struct pack *p, const void *data, size_t n)
{
    static const char zero[BLOCK];
    if (write_all(p->w->out, data, n))
        return -1;
    size_t pad = (size_t)padding((int64_t)n);
    return pad ? write_all(p->w->out, zero, pad) : 0;
}

static int put_header(struct pack *p, const char *name, const struct stat *st, char type, const char *link, int64_t size)
{
    struct header h = { 0 };
    struct buf pax = { 0 };
    char text[64];
    if (strlen(name) > sizeof h.name)
        pax_put(&pax, "path", name, strlen(name));
    if (strlen(link) > sizeof h.link)
        pax_put(&pax, "linkpath", link, strlen(link));
    if (size >= 1LL << 33) {
        int n = snprintf(text, sizeof text, "%lld", (long long)size);
        pax_put(&pax, "size", text, (size_t)n);
    }
    if (st->st_uid >= 1 << 21 || st->st_gid >= 1 << 21) {
        int n = snprintf(text, sizeof text, "%u", st->st_uid);
        pax_put(&pax, "uid", text, (size_t)n);
        n = snprintf(text, sizeof text, "%u", st->st_gid);
        pax_put(&pax, "gid", text, (size_t)n);
    }
    int n = snprintf(text, sizeof text, "%lld.%09ld", (long long)st->st_mtim.tv_sec, st->st_mtim.tv_nsec);
    pax_put(&pax, "mtime", text, (size_t)n);
    struct header x = { .name = "pax", .type = 'x' };
    put_octal(x.mode, sizeof x.mode, 0644);
    put_octal(x.size, sizeof x.size, pax.len);
    close_header(&x);
    memcpy(h.name, name, strnlen(name, sizeof h.name));
    memcpy(h.link, link, strnlen(link, sizeof h.link));
    put_octal(h.mode, sizeof h.mode, st->st_mode & 07777);
    put_octal(h.uid, sizeof h.uid, st->st_uid & 07777777);
    put_octal(h.gid, sizeof h.gid, st->st_gid & 07777777);
    put_octal(h.size, sizeof h.size, (uint64_t)size & 077777777777);
    put_octal(h.mtime, sizeof h.mtime, st->st_mtim.tv_sec > 0 ? (uint64_t)st->st_mtim.tv_sec : 0);
    h.type = type;
    close_header(&h);
    int r = put_block(p, &x, BLOCK) || put_block(p, pax.p, pax.len) || put_block(p, &h, BLOCK) ? -1 : 0;
    buf_free(&pax);
    return r;
}

static const char *earlier_name(struct pack *p, const struct stat *st, const char *name)
{
    if (st->st_nlink < 2)
        return NULL;
    for (size_t i = 0; i < p->n_links; i++)
        if (p->links[i].ino == st->st_ino && p->links[i].dev == st->st_dev)
            return p->links[i].name;
    if (p->n_links < MOST_LINKS) {
        p->links[p->n_links].ino = st->st_ino;
        p->links[p->n_links].dev = st->st_dev;
        p->links[p->n_links++].name = strdup(name);
    }
    return NULL;
}

/* A file that shrinks while it is read is filled with zeros; what it grows by is left out. */
static int put_content(struct pack *p, int fd, int64_t size)
{
    static const char zero[64 << 10];
    int64_t n = move_bytes(fd, p->w->out, size);
    if (n < 0)
        return -1;
    for (int64_t left = size - n + padding(size); left > 0;) {
        size_t want = left < (int64_t)sizeof zero ? (size_t)left : sizeof zero;
        if (write_all(p->w->out, zero, want))
            return -1;
        left -= (int64_t)want;
    }
    return 0;
}

static int pack_dir(struct pack *p, int fd, const char *name);

static int pack_one(struct pack *p, int dir, const char *base, const char *name)
{
    struct stat st;
    char link[PATH_LIMIT] = "";
    if (fstatat(dir, base, &st, AT_SYMLINK_NOFOLLOW))
        return errno == ENOENT ? 0 : -1; /* gone since it was listed */
    if (S_ISSOCK(st.st_mode) || S_ISCHR(st.st_mode) || S_ISBLK(st.st_mode))
        return 0;
    int64_t size = S_ISREG(st.st_mode) ? st.st_size : 0;
    if (++p->entries > p->most_entries || (p->bytes += size) > p->most_bytes) {
        errno = EFBIG;
        return -1;
    }
    if (S_ISDIR(st.st_mode)) {
        int fd = openat(dir, base, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        return fd < 0 || put_header(p, name, &st, '5', "", 0) ? -1 : pack_dir(p, fd, name);
    }
    if (S_ISLNK(st.st_mode)) {
        ssize_t n = readlinkat(dir, base, link, sizeof link - 1);
        return n < 0 ? -1 : put_header(p, name, &st, '2', link, 0);
    }
    if (S_ISFIFO(st.st_mode))
        return put_header(p, name, &st, '6', "", 0);
    const char *earlier = earlier_name(p, &st, name);
    if (earlier)
        return put_header(p, name, &st, '1', earlier, 0);
    int fd = openat(dir, base, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || put_header(p, name, &st, '0', "", size))
        return -1;
    int r = put_content(p, fd, size);
    close(fd);
    return r;
}

static int pack_dir(struct pack *p, int fd, const char *name)
{
    DIR *d = fdopendir(fd);
    int r = d ? 0 : -1;
    for (struct dirent *e; !r && (e = readdir(d)) != NULL;) {
        char full[PATH_LIMIT];
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
            continue;
        if (snprintf(full, sizeof full, "%s%s%s", name, *name ? "/" : "", e->d_name) >= (int)sizeof full) {
            errno = ENAMETOOLONG;
            r = -1;
        } else {
            r = pack_one(p, dirfd(d), e->d_name, full);
        }
    }
    int error = errno;
    if (d)
        closedir(d);
    errno = error;
    return r;
}

int get_tree(const struct worker *w, struct mp *m, const char *path)
{
    struct pack *p = calloc(1, sizeof *p);
    struct stat st;
    if (!p)
        return say_errno(w, ENOMEM, "pack", path);
    p->w = w;
    p->most_bytes = mp_read_int(m);
    p->most_entries = mp_read_int(m);
    if (m->bad || stat(path, &st))
        return say_errno(w, m->bad ? EINVAL : errno, "pack", path);
    int r;
    if (S_ISDIR(st.st_mode)) {
        int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        r = fd < 0 ? -1 : pack_dir(p, fd, "");
    } else {
        r = pack_one(p, AT_FDCWD, path, strrchr(path, '/') + 1);
    }
    static const char zero[2 * BLOCK];
    if (r || write_all(w->out, zero, sizeof zero))
        return say_errno(w, errno, "pack", path);
    struct buf b = { 0 };
    mp_array(&b, 2);
    mp_int(&b, p->entries);
    mp_int(&b, p->bytes);
    return say_done(w, &b);
}
