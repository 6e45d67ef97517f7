/* The limit of running programs: a bare posix_spawn loop, with N processes in flight.
 *
 *   spawn_limit [--count N] [--concurrency C] [PROGRAM ARG...]      (default: /bin/true)
 *
 * Prints one JSON object: programs started and reaped per second, and how long one takes. */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

extern char **environ;

struct running {
	pid_t pid;
	double start_ms;
};

static _Noreturn void die(const char *step, int error)
{
	fprintf(stderr, "spawn_limit: %s: %s\n", step, strerror(error));
	exit(1);
}

static double now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void start(struct running *r, char **argv)
{
	r->start_ms = now_ms();
	int error = posix_spawn(&r->pid, argv[0], NULL, NULL, argv, environ);
	if (error)
		die(argv[0], error);
}

/* Reap one; the slot that it had. */
static int reap(struct running *r, int slots)
{
	int status;
	pid_t pid = waitpid(-1, &status, 0);
	if (pid < 0)
		die("waitpid", errno);
	if (status)
		die("the program failed", EINVAL);
	for (int i = 0; i < slots; i++)
		if (r[i].pid == pid)
			return i;
	die("a child that nobody started", ECHILD);
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static void run(int count, int slots, char **argv)
{
	struct running *r = calloc((size_t)slots, sizeof *r);
	double *took = calloc((size_t)count, sizeof *took);
	if (!r || !took)
		die("calloc", errno);
	double begin = now_ms();
	int started = 0;
	for (; started < slots && started < count; started++)
		start(&r[started], argv);
	for (int done = 0; done < count; done++) {
		int slot = reap(r, slots);
		took[done] = now_ms() - r[slot].start_ms;
		r[slot].pid = 0;
		if (started < count) {
			started++;
			start(&r[slot], argv);
		}
	}
	double rate = count * 1e3 / (now_ms() - begin);
	qsort(took, (size_t)count, sizeof *took, ascending);
	printf("{\"count\":%d,\"concurrency\":%d,\"rate\":%.2f,\"p50_ms\":%.3f,\"p99_ms\":%.3f}\n", count, slots, rate,
	       took[count / 2], took[(int)(count * .99)]);
	free(r);
	free(took);
}

int main(int argc, char **argv)
{
	static const struct option known[] = {
	    {"count", required_argument, NULL, 'n'}, {"concurrency", required_argument, NULL, 'c'}, {0}};
	static char *program[] = {"/bin/true", NULL};
	int count = 2000, slots = 1;
	for (int c; (c = getopt_long(argc, argv, "+", known, NULL)) != -1;) {
		if (c == 'n')
			count = atoi(optarg);
		else if (c == 'c')
			slots = atoi(optarg);
		else
			return 2;
	}
	if (count < 1 || slots < 1 || slots > 4096) {
		fputs("spawn_limit: counts must be positive\n", stderr);
		return 2;
	}
	run(count, slots, optind < argc ? argv + optind : program);
	return 0;
}
