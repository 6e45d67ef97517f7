/* CONFIG: all policy of one sandbox, as data and descriptors. Mirrors dsec.wire.aether.Config. */
#ifndef DSEC_CONFIG_H
#define DSEC_CONFIG_H

#include "mp.h"

enum { MAX_FDS = 128, MAX_STEPS = 256, MAX_GROUP_FDS = 8, MAX_RLIMITS = 16 };

struct step {
    char *op, *target, *source, *data;
    int64_t flags;
};

struct limit {
    int resource;
    uint64_t soft, hard;
};

struct config {
    char *sandbox_id, *hostname, *user, *workdir;
    int root, listen, oom_counter;
    int join[MAX_GROUP_FDS], home[MAX_GROUP_FDS];
    uint32_t joins, homes;
    bool cgroup_v2, loopback;
    struct step steps[MAX_STEPS];
    uint32_t n_steps;
    void *seccomp;
    size_t seccomp_len;
    uint64_t capabilities;
    struct limit limits[MAX_RLIMITS];
    uint32_t n_limits;
    char **env; /* K=V, NULL at the end */
    char **shells;
    int oom_score_adj;
    unsigned umask;
    uint32_t max_operations;
};

/* Parses the payload; descriptors are taken from fds by index. False: not a CONFIG that we understand. */
bool config_parse(struct config *c, const uint8_t *p, size_t n, const int *fds, int n_fds);

/* A NULL-ended array of K=V from a msgpack map, or of strings from an array. NULL on bad input. */
char **read_env(struct mp *m);
char **read_strings(struct mp *m);
void free_strings(char **list);

#endif
