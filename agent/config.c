#include "config.h"

#include <stdlib.h>
#include <string.h>

void free_strings(char **list)
{
    for (char **s = list; s && *s; s++)
        free(*s);
    free(list);
}

static char *joined(struct slice k, struct slice v)
{
    if (memchr(k.p, 0, k.n) || memchr(v.p, 0, v.n) || !k.n || memchr(k.p, '=', k.n))
        return NULL;
    char *s = malloc(k.n + v.n + 2);
    if (!s)
        return NULL;
    memcpy(s, k.p, k.n);
    s[k.n] = '=';
    memcpy(s + k.n + 1, v.p, v.n);
    s[k.n + 1 + v.n] = 0;
    return s;
}

static char **read_list(struct mp *m, bool map)
{
    uint32_t n = map ? mp_read_map(m) : mp_read_array(m);
    char **out = m->bad ? NULL : calloc((size_t)n + 1, sizeof *out);
    for (uint32_t i = 0; out && i < n; i++) {
        struct slice k = mp_read_bytes(m);
        out[i] = map ? joined(k, mp_read_bytes(m)) : slice_dup(k);
        if (m->bad || !out[i]) {
            free_strings(out);
            out = NULL;
        }
    }
    if (!out)
        m->bad = true;
    return out;
}

char **read_env(struct mp *m)
{
    return read_list(m, true);
}

char **read_strings(struct mp *m)
{
    return read_list(m, false);
}

static char *text(struct mp *m)
{
    char *s = slice_dup(mp_read_bytes(m));
    if (!s)
        m->bad = true;
    return s;
}

static int descriptor(struct mp *m, const int *fds, int n, bool optional)
{
    int64_t i = mp_read_int(m);
    if (optional && i == -1)
        return -1;
    if (i < 0 || i >= n) {
        m->bad = true;
        return -1;
    }
    return fds[i];
}

static uint32_t descriptors(struct mp *m, int *out, const int *fds, int n)
{
    uint32_t count = mp_read_array(m);
    if (count > MAX_GROUP_FDS) {
        m->bad = true;
        return 0;
    }
    for (uint32_t i = 0; i < count; i++)
        out[i] = descriptor(m, fds, n, false);
    return count;
}

static void skip_from(struct mp *m, uint32_t have, uint32_t known)
{
    for (uint32_t i = known; i < have; i++)
        mp_skip(m);
    if (have < known)
        m->bad = true;
}

static void read_steps(struct mp *m, struct config *c, const int *fds, int n_fds)
{
    uint32_t n = mp_read_array(m);
    if (n > MAX_STEPS) {
        m->bad = true;
        return;
    }
    for (uint32_t i = 0; i < n && !m->bad; i++) {
        struct step *s = &c->steps[i];
        uint32_t fields = mp_read_array(m);
        s->op = text(m);
        s->target = text(m);
        s->source = text(m);
        s->flags = mp_read_int(m);
        s->data = text(m);
        skip_from(m, fields, 5);
        if (!m->bad && !strcmp(s->op, "attach")) {
            if (s->flags < 0 || s->flags >= n_fds)
                m->bad = true;
            else
                s->flags = fds[s->flags];
        }
    }
    c->n_steps = m->bad ? 0 : n;
}

static void read_limits(struct mp *m, struct config *c)
{
    uint32_t n = mp_read_array(m);
    if (n > MAX_RLIMITS) {
        m->bad = true;
        return;
    }
    for (uint32_t i = 0; i < n && !m->bad; i++) {
        uint32_t fields = mp_read_array(m);
        c->limits[i].resource = (int)mp_read_int(m);
        c->limits[i].soft = (uint64_t)mp_read_int(m);
        c->limits[i].hard = (uint64_t)mp_read_int(m);
        skip_from(m, fields, 3);
    }
    c->n_limits = n;
}

bool config_parse(struct config *c, const uint8_t *p, size_t n, const int *fds, int n_fds)
{
    struct mp in = { p, p + n, false }, *m = &in;
    uint32_t fields = mp_read_array(m);
    if (mp_read_int(m) != 1)
        return false;
    c->sandbox_id = text(m);
    c->root = descriptor(m, fds, n_fds, false);
    c->listen = descriptor(m, fds, n_fds, true);
    c->joins = descriptors(m, c->join, fds, n_fds);
    c->homes = descriptors(m, c->home, fds, n_fds);
    c->cgroup_v2 = mp_read_bool(m);
    c->oom_counter = descriptor(m, fds, n_fds, true);
    c->hostname = text(m);
    read_steps(m, c, fds, n_fds);
    struct slice filter = mp_read_bytes(m);
    if (filter.n && (c->seccomp = malloc(filter.n)) != NULL)
        memcpy(c->seccomp, filter.p, c->seccomp_len = filter.n);
    c->capabilities = (uint64_t)mp_read_int(m);
    read_limits(m, c);
    c->env = read_env(m);
    c->user = text(m);
    c->workdir = text(m);
    c->shells = read_strings(m);
    c->oom_score_adj = (int)mp_read_int(m);
    c->umask = (unsigned)mp_read_int(m);
    c->max_operations = (uint32_t)mp_read_int(m);
    c->loopback = mp_read_bool(m);
    skip_from(m, fields, 21);
    return !m->bad && (!filter.n || c->seccomp);
}
