#include "mp.h"

#include <stdlib.h>
#include <string.h>

bool buf_reserve(struct buf *b, size_t more)
{
    if (b->failed)
        return false;
    if (b->cap - b->len >= more)
        return true;
    size_t cap = b->cap ? b->cap : 256;
    while (cap - b->len < more) {
        if (cap > SIZE_MAX / 2) {
            b->failed = true;
            return false;
        }
        cap *= 2;
    }
    uint8_t *p = realloc(b->p, cap);
    if (!p) {
        b->failed = true;
        return false;
    }
    b->p = p;
    b->cap = cap;
    return true;
}

bool buf_put(struct buf *b, const void *data, size_t n)
{
    if (!buf_reserve(b, n))
        return false;
    if (n)
        memcpy(b->p + b->len, data, n);
    b->len += n;
    return true;
}

void buf_drop(struct buf *b, size_t n)
{
    if (n >= b->len) {
        b->len = 0;
        return;
    }
    memmove(b->p, b->p + n, b->len - n);
    b->len -= n;
}

void buf_free(struct buf *b)
{
    free(b->p);
    *b = (struct buf){ 0 };
}

static void put_be(struct buf *b, uint8_t tag, uint64_t v, int bytes)
{
    uint8_t out[9] = { tag };
    for (int i = 0; i < bytes; i++)
        out[1 + i] = (uint8_t)(v >> (8 * (bytes - 1 - i)));
    buf_put(b, out, (size_t)bytes + 1);
}

void mp_array(struct buf *b, uint32_t n)
{
    if (n < 16)
        put_be(b, (uint8_t)(0x90 | n), 0, 0);
    else
        put_be(b, 0xdd, n, 4);
}

void mp_int(struct buf *b, int64_t v)
{
    if (v >= 0 && v < 128)
        put_be(b, (uint8_t)v, 0, 0);
    else if (v < 0 && v >= -32)
        put_be(b, (uint8_t)(int8_t)v, 0, 0);
    else
        put_be(b, 0xd3, (uint64_t)v, 8);
}

void mp_bool(struct buf *b, bool v)
{
    put_be(b, v ? 0xc3 : 0xc2, 0, 0);
}

void mp_str(struct buf *b, const char *s)
{
    mp_strn(b, s, strlen(s));
}

/* Length of the valid UTF-8 sequence at s, 0 if there is none. */
static size_t utf8_len(const uint8_t *s, size_t n)
{
    if (s[0] < 0x80)
        return 1;
    size_t len = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || len > n)
        return 0;
    for (size_t i = 1; i < len; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    bool odd = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) ||
               (s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f);
    return odd ? 0 : len;
}

void mp_strn(struct buf *b, const char *s, size_t n)
{
    if (n < 32)
        put_be(b, (uint8_t)(0xa0 | n), 0, 0);
    else
        put_be(b, 0xdb, n, 4);
    if (!buf_reserve(b, n))
        return;
    for (size_t i = 0; i < n;) {
        size_t len = utf8_len((const uint8_t *)s + i, n - i);
        buf_put(b, len ? s + i : "?", len ? len : 1);
        i += len ? len : 1;
    }
}

void mp_bin(struct buf *b, const void *p, size_t n)
{
    put_be(b, 0xc6, n, 4);
    buf_put(b, p, n);
}

static uint64_t take(struct mp *m, int bytes)
{
    if (m->bad || m->end - m->p < bytes) {
        m->bad = true;
        return 0;
    }
    uint64_t v = 0;
    for (int i = 0; i < bytes; i++)
        v = v << 8 | *m->p++;
    return v;
}

/* The count of elements can never be larger than the bytes that are left: each takes one at least. */
static uint32_t counted(struct mp *m, uint64_t n)
{
    if (m->bad || n > (uint64_t)(m->end - m->p)) {
        m->bad = true;
        return 0;
    }
    return (uint32_t)n;
}

uint32_t mp_read_array(struct mp *m)
{
    uint8_t t = (uint8_t)take(m, 1);
    if ((t & 0xf0) == 0x90)
        return counted(m, t & 0x0f);
    if (t == 0xdc)
        return counted(m, take(m, 2));
    if (t == 0xdd)
        return counted(m, take(m, 4));
    m->bad = true;
    return 0;
}

uint32_t mp_read_map(struct mp *m)
{
    uint8_t t = (uint8_t)take(m, 1);
    if ((t & 0xf0) == 0x80)
        return counted(m, t & 0x0f);
    if (t == 0xde)
        return counted(m, take(m, 2));
    if (t == 0xdf)
        return counted(m, take(m, 4));
    m->bad = true;
    return 0;
}

int64_t mp_read_int(struct mp *m)
{
    uint8_t t = (uint8_t)take(m, 1);
    if (t < 0x80)
        return t;
    if (t >= 0xe0)
        return (int8_t)t;
    switch (t) {
    case 0xcc: return (int64_t)take(m, 1);
    case 0xcd: return (int64_t)take(m, 2);
    case 0xce: return (int64_t)take(m, 4);
    case 0xcf: {
        uint64_t v = take(m, 8);
        if (v > INT64_MAX)
            m->bad = true;
        return m->bad ? 0 : (int64_t)v;
    }
    case 0xd0: return (int8_t)take(m, 1);
    case 0xd1: return (int16_t)take(m, 2);
    case 0xd2: return (int32_t)take(m, 4);
    case 0xd3: return (int64_t)take(m, 8);
    default: m->bad = true; return 0;
    }
}

bool mp_read_bool(struct mp *m)
{
    uint8_t t = (uint8_t)take(m, 1);
    if (t != 0xc2 && t != 0xc3)
        m->bad = true;
    return t == 0xc3;
}

struct slice mp_read_bytes(struct mp *m)
{
    uint8_t t = (uint8_t)take(m, 1);
    uint64_t n = 0;
    if ((t & 0xe0) == 0xa0)
        n = t & 0x1f;
    else if (t == 0xc4 || t == 0xd9)
        n = take(m, 1);
    else if (t == 0xc5 || t == 0xda)
        n = take(m, 2);
    else if (t == 0xc6 || t == 0xdb)
        n = take(m, 4);
    else
        m->bad = true;
    if (m->bad || n > (uint64_t)(m->end - m->p)) {
        m->bad = true;
        return (struct slice){ "", 0 };
    }
    struct slice s = { (const char *)m->p, (size_t)n };
    m->p += n;
    return s;
}

static void skip(struct mp *m, int depth)
{
    if (depth > MP_MAX_DEPTH || m->bad || m->p >= m->end) {
        m->bad = true;
        return;
    }
    uint8_t t = *m->p;
    bool array = (t & 0xf0) == 0x90 || t == 0xdc || t == 0xdd;
    bool map = (t & 0xf0) == 0x80 || t == 0xde || t == 0xdf;
    if (array || map) {
        uint64_t n = array ? mp_read_array(m) : 2ULL * mp_read_map(m);
        for (uint64_t i = 0; i < n && !m->bad; i++)
            skip(m, depth + 1);
    } else if (t == 0xc0 || t == 0xc2 || t == 0xc3) {
        m->p++;
    } else if (t == 0xca) {
        take(m, 5);
    } else if (t == 0xcb) {
        take(m, 1);
        take(m, 8);
    } else if ((t & 0xe0) == 0xa0 || (t >= 0xc4 && t <= 0xc6) || (t >= 0xd9 && t <= 0xdb)) {
        mp_read_bytes(m);
    } else {
        mp_read_int(m);
    }
}

void mp_skip(struct mp *m)
{
    skip(m, 0);
}

bool slice_is(struct slice s, const char *text)
{
    return s.n == strlen(text) && !memcmp(s.p, text, s.n);
}

char *slice_dup(struct slice s)
{
    if (memchr(s.p, 0, s.n))
        return NULL;
    char *out = malloc(s.n + 1);
    if (!out)
        return NULL;
    memcpy(out, s.p, s.n);
    out[s.n] = 0;
    return out;
}
