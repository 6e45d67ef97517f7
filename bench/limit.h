/* The limit program: what the kernel must do for one sandbox, and nothing else. See limit.c. */
#ifndef DSEC_BENCH_LIMIT_H
#define DSEC_BENCH_LIMIT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { MAX_LAYERS = 16, CONTROLLERS = 3, IDS_EACH = 65536, FIRST_ID = 1 << 20 };

struct options {
	const char *layers[MAX_LAYERS];
	int n_layers;
	const char *pool; /* a file with a btrfs filesystem in it */
	int count, jobs;
	long memory_mb, pids, disk_mb;
	bool cycle; /* destroy each at once, instead of all after all */
	bool full;  /* with /sys, mqueue and the masks of the OCI runtime specification */
	bool keep;  /* hold them until stdin ends */
};

/* What all sandboxes share. Everything is a descriptor: nothing of it has a path once it is set up. */
struct host {
	int proc;                /* the host's /proc */
	int layers[MAX_LAYERS];  /* detached EROFS mounts */
	int n_layers;
	int pool_mount, pool;    /* a detached mount, and the root of the btrfs filesystem */
	int groups[CONTROLLERS]; /* our parent group: v1 memory, pids, cpu; v2: the first alone */
	int n_groups;
	bool v2;
	int tops[CONTROLLERS];   /* where our parent groups lie */
	char group_name[32];
};

struct sandbox {
	pid_t pid;
	char name[16];
};

/* limit_host.c */
void host_open(struct host *h, const struct options *o);
void host_close(const struct host *h);

/* limit_sandbox.c */
void sandbox_worker_init(int channel[2]);
void sandbox_create(struct sandbox *s, int index, const struct host *h, const struct options *o, int channel[2]);
void sandbox_destroy(const struct sandbox *s, const struct host *h);
void leave_groups(const struct host *h);

/* limit.c */
extern int failure_fd; /* where die() says 'E' to who waits */
_Noreturn void die(const char *step, const char *detail);
int need(int result, const char *step, const char *detail);
void put(int dir, const char *name, const char *text);

#endif
