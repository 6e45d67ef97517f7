/* Fuzzes what parses bytes of the other side: frames, msgpack, CONFIG. Under libFuzzer (-DLIBFUZZER), or by itself:
 *   fuzz SEED ITERATIONS     mutates its own corpus, under the sanitizers
 * Ends with 0 and a count; a finding is the sanitizer's abort. */
#include "../config.h"
#include "../frame.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void walk_frames(const uint8_t *p, size_t n)
{
    size_t used = 0;
    struct frame f;
    for (long size; (size = frame_decode(p + used, n - used, &f)) > 0; used += (size_t)size) {
        if (f.payload < p || f.payload + f.length > p + n)
            abort();
        frame_u64(&f);
        struct mp m = { f.payload, f.payload + f.length, false };
        while (m.p < m.end && !m.bad)
            mp_skip(&m);
    }
}

static void walk_request(const uint8_t *p, size_t n)
{
    struct mp m = { p, p + n, false };
    uint32_t fields = mp_read_array(&m);
    struct slice tag = mp_read_bytes(&m);
    free(slice_dup(mp_read_bytes(&m)));
    if (slice_is(tag, "exec")) {
        free_strings(read_strings(&m));
        free_strings(read_env(&m));
    }
    for (uint32_t i = 0; i < fields && !m.bad; i++)
        mp_skip(&m);
    struct buf b = { 0 };
    mp_strn(&b, (const char *)p, n);
    if (b.len < n && !b.failed)
        abort();
    buf_drop(&b, n / 2);
    buf_free(&b);
}

static void walk_config(const uint8_t *p, size_t n)
{
    static const int fds[4] = { 3, 4, 5, 6 };
    struct config *c = calloc(1, sizeof *c);
    if (!c)
        return;
    config_parse(c, p, n, fds, 4);
    free(c->sandbox_id);
    free(c->hostname);
    free(c->user);
    free(c->workdir);
    free(c->seccomp);
    free_strings(c->env);
    free_strings(c->shells);
    for (int i = 0; i < MAX_STEPS; i++) {
        free(c->steps[i].op);
        free(c->steps[i].target);
        free(c->steps[i].source);
        free(c->steps[i].data);
    }
    free(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    walk_frames(p, n);
    walk_request(p, n);
    walk_config(p, n);
    return 0;
}

#ifndef LIBFUZZER
static uint64_t state;

static uint32_t next(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

static size_t seed_frames(uint8_t *out)
{
    struct buf b = { 0 }, m = { 0 };
    mp_array(&m, 13);
    mp_str(&m, "exec");
    mp_str(&m, "op-1");
    mp_array(&m, 2);
    mp_str(&m, "/bin/echo");
    mp_bin(&m, "\xff\xfe", 2);
    const uint8_t map[] = { 0x81, 0xa1, 'A', 0xa1, 'B' };
    buf_put(&m, map, sizeof map);
    for (int i = 0; i < 9; i++)
        mp_int(&m, i * 1000000007LL - 5);
    if (next() & 1) {
        frame_put(&b, 1, F_START, 0, m.p, m.len);
        frame_put_u64(&b, 1, F_ACK, S_STDOUT, 1 << 20);
        frame_put(&b, 1, F_DATA, S_STDIN, "hello", 5);
    } else {
        buf_put(&b, m.p, m.len);
    }
    size_t n = b.len < 4096 ? b.len : 4096;
    memcpy(out, b.p, n);
    buf_free(&b);
    buf_free(&m);
    return n;
}

static size_t seed_config(uint8_t *out)
{
    struct buf m = { 0 };
    mp_array(&m, 21);
    mp_int(&m, 1);
    mp_str(&m, "sbx-e-aaaaaaaaaaaa");
    mp_int(&m, 0);
    mp_int(&m, -1);
    for (int i = 0; i < 2; i++) {
        mp_array(&m, 1);
        mp_int(&m, 2);
    }
    mp_bool(&m, false);
    mp_int(&m, 3);
    mp_str(&m, "host");
    mp_array(&m, 1);
    mp_array(&m, 5);
    mp_str(&m, "attach");
    mp_str(&m, "/dev");
    mp_str(&m, "");
    mp_int(&m, 1);
    mp_str(&m, "");
    mp_bin(&m, "12345678", 8);
    mp_int(&m, 0x7fffffff);
    mp_array(&m, 1);
    mp_array(&m, 3);
    for (int i = 0; i < 3; i++)
        mp_int(&m, 7);
    const uint8_t map[] = { 0x81, 0xa1, 'A', 0xa1, 'B' };
    buf_put(&m, map, sizeof map);
    mp_str(&m, "root");
    mp_str(&m, "/");
    mp_array(&m, 1);
    mp_str(&m, "/bin/sh");
    for (int i = 0; i < 3; i++)
        mp_int(&m, 100);
    mp_bool(&m, true);
    size_t n = m.len;
    memcpy(out, m.p, n);
    buf_free(&m);
    return n;
}

int main(int argc, char **argv)
{
    static uint8_t bytes[8192];
    state = argc > 1 ? strtoull(argv[1], NULL, 10) * 2654435761ULL + 1 : 1;
    long rounds = argc > 2 ? atol(argv[2]) : 100000;
    for (long i = 0; i < rounds; i++) {
        size_t n = next() & 1 ? seed_frames(bytes) : seed_config(bytes);
        for (uint32_t k = next() % 8; k > 0 && n; k--) {
            uint32_t at = next() % n;
            switch (next() % 4) {
            case 0: bytes[at] = (uint8_t)next(); break;
            case 1: bytes[at] ^= (uint8_t)(1 << next() % 8); break;
            case 2: n = at; break;
            default: bytes[at] = (uint8_t)(0xc0 + next() % 0x20); break;
            }
        }
        /* In memory of exactly this size, so that one byte too far is seen. */
        uint8_t *exact = malloc(n ? n : 1);
        if (!exact)
            return 1;
        memcpy(exact, bytes, n);
        LLVMFuzzerTestOneInput(exact, n);
        free(exact);
    }
    printf("%ld inputs\n", rounds);
    return 0;
}
#endif
