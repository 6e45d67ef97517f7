/* msgpack, the subset that the protocol uses: a bounded reader over bytes, and a writer that grows a buffer. */
#ifndef DSEC_MP_H
#define DSEC_MP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MP_MAX_DEPTH = 8 };

/* A buffer that grows. `failed` sticks once memory ran out; its content is then not to be used. */
struct buf {
    uint8_t *p;
    size_t len, cap;
    bool failed;
};

bool buf_reserve(struct buf *b, size_t more);
bool buf_put(struct buf *b, const void *data, size_t n);
void buf_drop(struct buf *b, size_t n); /* the first n bytes */
void buf_free(struct buf *b);

void mp_array(struct buf *b, uint32_t n);
void mp_int(struct buf *b, int64_t v);
void mp_bool(struct buf *b, bool v);
void mp_str(struct buf *b, const char *s);
void mp_strn(struct buf *b, const char *s, size_t n); /* bytes that are not UTF-8 become '?' */
void mp_bin(struct buf *b, const void *p, size_t n);

/* A reader. Every function gives a neutral value and sets `bad` when the bytes are not what was asked for. */
struct mp {
    const uint8_t *p, *end;
    bool bad;
};

struct slice {
    const char *p;
    size_t n;
};

uint32_t mp_read_array(struct mp *m); /* number of elements */
uint32_t mp_read_map(struct mp *m);
int64_t mp_read_int(struct mp *m);
bool mp_read_bool(struct mp *m);
struct slice mp_read_bytes(struct mp *m); /* str or bin, points into the input */
void mp_skip(struct mp *m);               /* one value, whatever it is */

bool slice_is(struct slice s, const char *text);
/* A copy with a NUL at its end. NULL when memory ran out or the slice holds a NUL. */
char *slice_dup(struct slice s);

#endif
