/* The limit program: does what the kernel must do for one sandbox, and nothing else, as fast as we know how.
 *
 * A sandbox here: its own user, pid, mount, ipc, uts, net and cgroup namespaces with 65,536 ids; an overlay of
 * idmapped EROFS layers below an idmapped writable layer of limited size (a btrfs subvolume with a quota); memory,
 * pids and cpu groups with limits; /proc, /dev, /dev/shm, /dev/pts, loopback, hostname; pivot_root; a static PID 1
 * that stays. `--full` adds /sys, mqueue and the masks of /proc.
 *
 *   limit --pool FILE --layer EROFS... [--count N] [--jobs J] [--cycle] [--full] [--keep]
 *
 * Prints one JSON object. Leaves nothing: mounts and the loop device go with their last descriptor.
 */
#define _GNU_SOURCE
#include "limit.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Shared by all workers. */
struct board {
	atomic_int next;
	double *created_ms, *destroyed_ms; /* by sandbox */
};

/* Workers wait for each of these to be closed by the main process; each says on `done` when it has finished. */
struct gates {
	int create[2], destroy[2], done[2];
};

int failure_fd = -1;

_Noreturn void die(const char *step, const char *detail)
{
	int error = errno;
	fprintf(stderr, "limit: %s %s: %s\n", step, detail, strerror(error));
	if (failure_fd >= 0 && write(failure_fd, "E", 1) != 1)
		fputs("limit: nobody to tell\n", stderr);
	_exit(1);
}

int need(int result, const char *step, const char *detail)
{
	if (result < 0)
		die(step, detail);
	return result;
}

void put(int dir, const char *name, const char *text)
{
	int fd = need(openat(dir, name, O_WRONLY | O_CLOEXEC), "open", name);
	if (write(fd, text, strlen(text)) != (ssize_t)strlen(text))
		die("write", name);
	close(fd);
}

static double now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void *shared(size_t size)
{
	void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED)
		die("mmap", "");
	return at;
}

/* --- one worker --- */

static void wait_gate(int gate[2])
{
	char byte;
	close(gate[1]);
	need((int)read(gate[0], &byte, 1), "read", "gate");
}

static void tell(int done[2])
{
	if (write(done[1], "d", 1) != 1)
		die("write", "done");
}

static _Noreturn void worker(struct board *b, struct gates *g, const struct host *h, const struct options *o)
{
	int channel[2], made = 0;
	struct sandbox *mine = calloc((size_t)o->count, sizeof *mine);
	int *indices = calloc((size_t)o->count, sizeof *indices);
	if (!mine || !indices)
		die("calloc", "");
	sandbox_worker_init(channel);
	failure_fd = g->done[1];
	tell(g->done);
	wait_gate(g->create);
	for (int i; (i = atomic_fetch_add(&b->next, 1)) < o->count; made++) {
		double start = now_ms();
		sandbox_create(&mine[made], i, h, o, channel);
		b->created_ms[i] = now_ms() - start;
		indices[made] = i;
		if (o->cycle) {
			leave_groups(h);
			sandbox_destroy(&mine[made], h);
		}
	}
	leave_groups(h);
	tell(g->done);
	wait_gate(g->destroy);
	for (int n = 0; n < made && !o->cycle; n++) {
		double start = now_ms();
		sandbox_destroy(&mine[n], h);
		b->destroyed_ms[indices[n]] = now_ms() - start;
	}
	tell(g->done);
	_exit(0);
}

/* --- all of them --- */

static void start_workers(struct board *b, struct gates *g, const struct host *h, const struct options *o)
{
	need(pipe2(g->create, O_CLOEXEC) | pipe2(g->destroy, O_CLOEXEC) | pipe2(g->done, O_CLOEXEC), "pipe2", "");
	for (int i = 0; i < o->jobs; i++)
		if (need(fork(), "fork", "worker") == 0)
			worker(b, g, h, o);
	close(g->done[1]);
}

/* False: a worker has failed. */
static bool all_done(const struct gates *g, const struct options *o)
{
	char byte;
	for (int n = 0; n < o->jobs; n++)
		if (need((int)read(g->done[0], &byte, 1), "read", "done") != 1 || byte != 'd')
			return false;
	return true;
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static double percentile(double *sorted, int n, double share)
{
	int at = (int)((double)n * share);
	return sorted[at < n ? at : n - 1];
}

static long available_kb(const struct host *h)
{
	char text[512] = {0};
	int fd = need(openat(h->proc, "meminfo", O_RDONLY | O_CLOEXEC), "open", "meminfo");
	need((int)read(fd, text, sizeof text - 1), "read", "meminfo");
	close(fd);
	const char *at = strstr(text, "MemAvailable:");
	return at ? atol(at + strlen("MemAvailable:")) : 0;
}

static void report(const struct board *b, const struct options *o, double create_ms, double destroy_ms, long kb)
{
	int n = o->count;
	qsort(b->created_ms, (size_t)n, sizeof(double), ascending);
	qsort(b->destroyed_ms, (size_t)n, sizeof(double), ascending);
	printf("{\"count\":%d,\"jobs\":%d,\"layers\":%d,\"full\":%s,\"rate\":%.2f,\"p50_ms\":%.3f,\"p99_ms\":%.3f", n, o->jobs,
	       o->n_layers, o->full ? "true" : "false", n * 1e3 / create_ms, percentile(b->created_ms, n, .5),
	       percentile(b->created_ms, n, .99));
	if (!o->cycle)
		printf(",\"destroy_rate\":%.2f,\"destroy_p50_ms\":%.3f,\"destroy_p99_ms\":%.3f,\"mb_each\":%.3f",
		       n * 1e3 / destroy_ms, percentile(b->destroyed_ms, n, .5), percentile(b->destroyed_ms, n, .99),
		       (double)kb / 1024 / n);
	puts("}");
}

/* Ends what a failed worker left (its sandboxes die with it), then removes the groups. */
static int finish(const struct host *h, bool ok)
{
	while (waitpid(-1, NULL, 0) > 0 || errno == EINTR)
		;
	host_close(h);
	return ok ? 0 : 1;
}

static int run(const struct options *o)
{
	struct host h = {0};
	struct gates g;
	struct board *b = shared(sizeof *b);
	b->created_ms = shared((size_t)o->count * sizeof(double));
	b->destroyed_ms = shared((size_t)o->count * sizeof(double));
	need(prctl(PR_SET_CHILD_SUBREAPER, 1), "PR_SET_CHILD_SUBREAPER", "");
	host_open(&h, o);
	start_workers(b, &g, &h, o);
	bool ok = all_done(&g, o);
	long before = available_kb(&h);
	double start = now_ms();
	close(g.create[0]), close(g.create[1]);
	ok = ok && all_done(&g, o);
	double created = now_ms();
	long held = before - available_kb(&h);
	for (char byte; ok && o->keep && read(0, &byte, 1) > 0;)
		;
	double hold_end = now_ms();
	close(g.destroy[0]), close(g.destroy[1]);
	ok = ok && all_done(&g, o);
	if (ok)
		report(b, o, created - start, now_ms() - hold_end, held);
	return finish(&h, ok);
}

static const struct option known[] = {
    {"layer", required_argument, NULL, 'l'},  {"pool", required_argument, NULL, 'p'},
    {"count", required_argument, NULL, 'n'},  {"jobs", required_argument, NULL, 'j'},
    {"memory-mb", required_argument, NULL, 'm'}, {"pids", required_argument, NULL, 'i'},
    {"disk-mb", required_argument, NULL, 'd'}, {"cycle", no_argument, NULL, 'c'},
    {"full", no_argument, NULL, 'f'},         {"keep", no_argument, NULL, 'k'},
    {0}};

static bool parse(int argc, char **argv, struct options *o)
{
	for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;)
		switch (c) {
		case 'l':
			if (o->n_layers == MAX_LAYERS)
				return false;
			o->layers[o->n_layers++] = optarg;
			break;
		case 'p': o->pool = optarg; break;
		case 'n': o->count = atoi(optarg); break;
		case 'j': o->jobs = atoi(optarg); break;
		case 'm': o->memory_mb = atol(optarg); break;
		case 'i': o->pids = atol(optarg); break;
		case 'd': o->disk_mb = atol(optarg); break;
		case 'c': o->cycle = true; break;
		case 'f': o->full = true; break;
		case 'k': o->keep = true; break;
		default: return false;
		}
	return o->n_layers && o->pool && optind == argc && o->count > 0 && o->jobs > 0 && o->jobs <= 1024 &&
	       o->count <= 60000;
}

int main(int argc, char **argv)
{
	struct options o = {
	    .count = 200, .jobs = (int)sysconf(_SC_NPROCESSORS_ONLN), .memory_mb = 2048, .pids = 1024, .disk_mb = 4096};
	if (!parse(argc, argv, &o)) {
		fprintf(stderr, "usage: %s --pool FILE --layer EROFS... [--count N] [--jobs J] [--memory-mb M] [--pids P]\n"
				"       [--disk-mb D] [--cycle] [--full] [--keep]\n", argv[0]);
		return 2;
	}
	return run(&o);
}
