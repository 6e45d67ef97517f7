/* One sandbox: made, and ended. The order is that which costs least: the worker joins the new groups before it
 * clones, so that the sandbox is born in them. */
#define _GNU_SOURCE
#include "limit.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/sched.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef CLONE_INTO_CGROUP
#define CLONE_INTO_CGROUP 0x200000000ULL
#endif
#define SECBIT_NO_SETUID_FIXUP 4

static const char ready = 'R';

/* --- control groups --- */

static void make_group(const struct host *h, const struct options *o, int i, const char *name)
{
	char text[64], path[64];
	need(mkdirat(h->groups[i], name, 0755), "mkdir group", name);
	if (i == 0) {
		snprintf(path, sizeof path, "%s/%s", name, h->v2 ? "memory.max" : "memory.limit_in_bytes");
		snprintf(text, sizeof text, "%ld", o->memory_mb << 20);
		put(h->groups[i], path, text);
	}
	if (i == 1 || h->v2) {
		snprintf(path, sizeof path, "%s/pids.max", name);
		snprintf(text, sizeof text, "%ld", o->pids);
		put(h->groups[i], path, text);
	}
	if (i == 2 || h->v2) {
		snprintf(path, sizeof path, "%s/%s", name, h->v2 ? "cpu.max" : "cpu.cfs_quota_us");
		put(h->groups[i], path, h->v2 ? "100000 100000" : "100000");
	}
	if (!h->v2) { /* a single thread that moves itself needs no global lock */
		snprintf(path, sizeof path, "%s/tasks", name);
		put(h->groups[i], path, "0");
	}
}

static int enter_groups(const struct host *h, const struct options *o, const char *name)
{
	for (int i = 0; i < h->n_groups; i++)
		make_group(h, o, i, name);
	return h->v2 ? need(openat(h->groups[0], name, O_PATH | O_CLOEXEC), "open group", name) : -1;
}

void leave_groups(const struct host *h)
{
	for (int i = 0; !h->v2 && i < h->n_groups; i++)
		put(h->groups[i], "tasks", "0");
}

/* --- the root --- */

static int make_upper(const struct host *h, const struct options *o, const char *name)
{
	struct btrfs_ioctl_vol_args create = {0};
	snprintf(create.name, sizeof create.name, "%s", name);
	need(ioctl(h->pool, BTRFS_IOC_SUBVOL_CREATE, &create), "BTRFS_IOC_SUBVOL_CREATE", name);
	int volume = need(openat(h->pool, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC), "open", name);
	struct btrfs_ioctl_qgroup_limit_args limit = {
	    .lim = {.flags = BTRFS_QGROUP_LIMIT_MAX_RFER, .max_rfer = (unsigned long long)o->disk_mb << 20}};
	need(ioctl(volume, BTRFS_IOC_QGROUP_LIMIT, &limit), "BTRFS_IOC_QGROUP_LIMIT", name);
	need(mkdirat(volume, "upper", 0755), "mkdir", "upper");
	need(mkdirat(volume, "work", 0755), "mkdir", "work");
	return volume;
}

static int idmapped(int mount, int userns)
{
	int fd = need(open_tree(mount, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH), "open_tree", "");
	struct mount_attr attr = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (unsigned)userns};
	need(mount_setattr(fd, "", AT_EMPTY_PATH, &attr, sizeof attr), "mount_setattr", "idmap");
	return fd;
}

static void add_fd(int fs, const char *key, int dir, const char *name)
{
	int fd = name ? need(openat(dir, name, O_PATH | O_DIRECTORY | O_CLOEXEC), "open", name) : dir;
	need(fsconfig(fs, FSCONFIG_SET_FD, key, NULL, fd), "fsconfig", key);
	if (name)
		close(fd);
}

static int make_root(const struct host *h, int volume, int userns)
{
	static const char *const fixed[][2] = {
	    {"redirect_dir", "nofollow"}, {"metacopy", "off"}, {"index", "off"}, {"source", "overlay"}};
	int fs = need(fsopen("overlay", FSOPEN_CLOEXEC), "fsopen", "overlay");
	for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
		need(fsconfig(fs, FSCONFIG_SET_STRING, fixed[i][0], fixed[i][1], 0), "fsconfig", fixed[i][0]);
	need(fsconfig(fs, FSCONFIG_SET_FLAG, "volatile", NULL, 0), "fsconfig", "volatile");
	int layers[MAX_LAYERS]; /* a detached mount lasts as long as its descriptor: closed after the create */
	for (int i = h->n_layers - 1; i >= 0; i--) /* the uppermost first */
		add_fd(fs, "lowerdir+", layers[i] = idmapped(h->layers[i], userns), NULL);
	int upper = idmapped(volume, userns);
	add_fd(fs, "upperdir", upper, "upper");
	add_fd(fs, "workdir", upper, "work");
	need(fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0), "mount", "overlay");
	close(upper);
	for (int i = 0; i < h->n_layers; i++)
		close(layers[i]);
	int root = need(fsmount(fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NODEV), "fsmount", "overlay");
	close(fs);
	return root;
}

/* --- the inside --- */

static void loopback_up(void)
{
	int fd = need(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "socket", "");
	struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
	need(ioctl(fd, SIOCSIFFLAGS, &request), "SIOCSIFFLAGS", "lo");
	close(fd);
}

static int receive_root(int channel)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control;
	char byte;
	struct iovec vec = {&byte, 1};
	struct msghdr message = {
	    .msg_iov = &vec, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
	int fd = -1;
	if (need((int)recvmsg(channel, &message, MSG_CMSG_CLOEXEC), "recvmsg", "") == 1 && CMSG_FIRSTHDR(&message))
		memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
	return need(fd, "recvmsg", "no descriptor");
}

static void send_root(int channel, int root)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = {0};
	char byte = 0;
	struct iovec vec = {&byte, 1};
	struct msghdr message = {
	    .msg_iov = &vec, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
	*CMSG_FIRSTHDR(&message) =
	    (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
	memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), &root, sizeof root);
	need((int)sendmsg(channel, &message, MSG_NOSIGNAL), "sendmsg", "");
}

static void mount_all(void)
{
	const unsigned long safe = MS_NOSUID | MS_NODEV;
	need(mount("proc", "proc", "proc", safe | MS_NOEXEC, NULL), "mount", "/proc");
	need(mount("/dev", "dev", NULL, MS_BIND, NULL), "bind", "/dev");
	need(mount("shm", "dev/shm", "tmpfs", safe, "mode=1777,size=64m"), "mount", "/dev/shm");
	need(mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620"), "mount",
	     "/dev/pts");
}

/* What policy adds: /sys and mqueue, and the paths of the OCI runtime specification masked or read-only. */
static void mount_policy(void)
{
	static const char *const masked[] = {"proc/kcore", "proc/keys", "proc/timer_list", "proc/kpagecgroup",
					     "proc/kpageflags", "proc/kpagecount", "proc/sysrq-trigger"};
	static const char *const fixed[] = {"proc/sys", "proc/fs", "proc/irq", "proc/bus"};
	const unsigned long safe = MS_NOSUID | MS_NODEV | MS_NOEXEC;
	need(mount("sysfs", "sys", "sysfs", safe | MS_RDONLY, NULL), "mount", "/sys");
	need(mount("mqueue", "dev/mqueue", "mqueue", safe, NULL), "mount", "/dev/mqueue");
	for (size_t i = 0; i < sizeof masked / sizeof *masked; i++)
		if (mount("dev/null", masked[i], NULL, MS_BIND, NULL) < 0 && errno != ENOENT)
			die("mask", masked[i]);
	for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) {
		if (mount(fixed[i], fixed[i], NULL, MS_BIND, NULL) < 0) {
			if (errno == ENOENT)
				continue;
			die("bind", fixed[i]);
		}
		need(mount(NULL, fixed[i], NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | safe, NULL), "remount", fixed[i]);
	}
}

static void become_root(void)
{
	need(setresgid(0, 0, 0), "setresgid", "0");
	need(setresuid(0, 0, 0), "setresuid", "0");
	need(prctl(PR_SET_PDEATHSIG, SIGKILL), "PR_SET_PDEATHSIG", "");
}

/* PID 1 of the sandbox: sets it up, says so, and stays. SIGCHLD is ignored, so orphans leave no zombies. */
static _Noreturn void inside(const char *name, const struct options *o, int channel[2])
{
	close(channel[0]);
	failure_fd = channel[1];
	loopback_up();
	need(sethostname(name, strlen(name)), "sethostname", name);
	int root = receive_root(channel[1]);
	become_root();
	need(move_mount(root, "", AT_FDCWD, "/new", MOVE_MOUNT_F_EMPTY_PATH), "move_mount", "root");
	close(root);
	need(chdir("/new"), "chdir", "/new");
	mount_all();
	if (o->full)
		mount_policy();
	need((int)syscall(SYS_pivot_root, ".", "."), "pivot_root", "");
	need(umount2(".", MNT_DETACH), "umount", "old root");
	if (write(channel[1], &ready, 1) != 1)
		_exit(1);
	need((int)syscall(SYS_close_range, 3, ~0U, 0), "close_range", "");
	for (;;)
		pause();
}

/* --- from outside --- */

static void write_maps(const struct host *h, pid_t pid, int index)
{
	char path[32], text[64];
	snprintf(text, sizeof text, "0 %u %d", FIRST_ID + (unsigned)index * IDS_EACH, IDS_EACH);
	snprintf(path, sizeof path, "%d/uid_map", pid);
	put(h->proc, path, text);
	snprintf(path, sizeof path, "%d/gid_map", pid);
	put(h->proc, path, text);
}

static int open_userns(const struct host *h, pid_t pid)
{
	char path[32];
	snprintf(path, sizeof path, "%d/ns/user", pid);
	return need(openat(h->proc, path, O_RDONLY | O_CLOEXEC), "open", path);
}

static void clone_sandbox(struct sandbox *s, int group, const struct options *o, int channel[2])
{
	struct clone_args args = {
	    .flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET |
		     CLONE_NEWCGROUP | (group < 0 ? 0 : CLONE_INTO_CGROUP),
	    .exit_signal = SIGCHLD,
	    .cgroup = group < 0 ? 0 : (unsigned)group};
	s->pid = (pid_t)need((int)syscall(SYS_clone3, &args, sizeof args), "clone3", s->name);
	if (s->pid == 0)
		inside(s->name, o, channel);
	if (group >= 0)
		close(group);
}

/* The overlay's maker must be the sandbox's root by file-system ids: with plain 0, unmapped in the upper's
 * mount, the result is silently read-only. */
static int make_root_as(const struct host *h, int volume, int userns, unsigned id)
{
	setfsgid(id);
	setfsuid(id);
	int root = make_root(h, volume, userns);
	setfsuid(0);
	setfsgid(0);
	return root;
}

/* Once in each worker. A channel serves one sandbox after another. */
void sandbox_worker_init(int channel[2])
{
	need(prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP), "PR_SET_SECUREBITS", "");
	need(prctl(PR_SET_PDEATHSIG, SIGKILL), "PR_SET_PDEATHSIG", "");
	need(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, channel), "socketpair", "");
}

static void wait_ready(const struct sandbox *s, int channel)
{
	char answer = 0;
	if (read(channel, &answer, 1) != 1 || answer != ready)
		die("sandbox ended before it was ready", s->name);
}

void sandbox_create(struct sandbox *s, int index, const struct host *h, const struct options *o, int channel[2])
{
	snprintf(s->name, sizeof s->name, "s%d", index);
	int group = enter_groups(h, o, s->name);
	clone_sandbox(s, group, o, channel);
	int volume = make_upper(h, o, s->name);
	write_maps(h, s->pid, index);
	int userns = open_userns(h, s->pid);
	int root = make_root_as(h, volume, userns, FIRST_ID + (unsigned)index * IDS_EACH);
	close(userns);
	close(volume);
	send_root(channel[0], root);
	close(root);
	wait_ready(s, channel[0]);
}

static void remove_groups(const struct host *h, const char *name)
{
	for (int i = 0; i < h->n_groups; i++)
		need(unlinkat(h->groups[i], name, AT_REMOVEDIR), "rmdir group", name);
}

void sandbox_destroy(const struct sandbox *s, const struct host *h)
{
	need(kill(s->pid, SIGKILL), "kill", s->name);
	need(waitpid(s->pid, NULL, 0), "waitpid", s->name);
	remove_groups(h, s->name);
	struct btrfs_ioctl_vol_args gone = {0};
	snprintf(gone.name, sizeof gone.name, "%s", s->name);
	need(ioctl(h->pool, BTRFS_IOC_SNAP_DESTROY, &gone), "BTRFS_IOC_SNAP_DESTROY", s->name);
}
