/* What the file workers share: answers, paths, and copying between descriptors. */
#ifndef DSEC_WORKER_H
#define DSEC_WORKER_H

#include "aether.h"

#include <sys/stat.h>

enum { PATH_LIMIT = 4096, LISTING_LIMIT = 900 << 10, COPY_CHUNK = 1 << 20 };

struct worker {
    int in, out, result;
};

/* Both end the operation; the worker returns their value. */
int say_done(const struct worker *w, const struct buf *payload);
int say_failure(const struct worker *w, const char *code, int error, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* The code that fits an errno. */
int say_errno(const struct worker *w, int error, const char *what, const char *path);

/* Bytes moved, up to `most` (-1: to the end); -1 with errno. Zero-copy where the kernel can. */
int64_t move_bytes(int from, int to, int64_t most);

int make_parents(char *path);
void put_stat(struct buf *b, const char *path, const struct stat *st, const char *target);
/* 0, or an errno. `spec`: "user", "user:group", numbers. */
int resolve_owner(const char *spec, uid_t *uid, gid_t *gid);
int remove_tree(int dir, const char *name);
void name_of_id(const char *file, unsigned id, char out[64]);

int put_tree(const struct worker *w, struct mp *m, const char *path);
int get_tree(const struct worker *w, struct mp *m, const char *path);
int watch_path(const struct worker *w, struct mp *m, const char *path);

#endif
