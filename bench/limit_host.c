/* What is made once: layer mounts, the pool of writable layers, control groups, a mount namespace with
 * next to nothing in it (each sandbox's namespace starts as a copy of it). */
#define _GNU_SOURCE
#include "limit.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/loop.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#ifndef BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA
#define BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA 4
#endif

static const char *const controllers[CONTROLLERS] = {"memory", "pids", "cpu"};

/* `options`: NULL, or `key` or `key=value` strings that end with NULL. */
static void configure(int fs, const char *const *options)
{
	for (; options && *options; options++) {
		char key[64];
		snprintf(key, sizeof key, "%s", *options);
		char *value = strchr(key, '=');
		if (value)
			*value++ = 0;
		need(fsconfig(fs, value ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG, key, value, 0), "fsconfig", key);
	}
}

static int mount_detached(const char *type, const char *source, const char *const *options, unsigned attrs)
{
	int fs = need(fsopen(type, FSOPEN_CLOEXEC), "fsopen", type);
	need(fsconfig(fs, FSCONFIG_SET_STRING, "source", source, 0), "fsconfig source", source);
	configure(fs, options);
	need(fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0), "mount", source);
	int fd = need(fsmount(fs, FSMOUNT_CLOEXEC, attrs), "fsmount", source);
	close(fs);
	return fd;
}

/* A detached mount can be cloned only in the namespace that it was made in, where the files have no path. */
static int mount_open_file(const char *type, int file, const char *const *options, unsigned attrs)
{
	char source[32];
	snprintf(source, sizeof source, "/proc/self/fd/%d", file);
	int fd = mount_detached(type, source, options, attrs);
	close(file);
	return fd;
}

static void open_layers(struct host *h, const struct options *o)
{
	for (int i = 0; i < o->n_layers; i++)
		h->layers[i] = need(open(o->layers[i], O_RDONLY | O_CLOEXEC), "open", o->layers[i]);
	h->n_layers = o->n_layers;
}

static void mount_layers(struct host *h)
{
	static const char *const options[] = {"ro", NULL};
	for (int i = 0; i < h->n_layers; i++)
		h->layers[i] = mount_open_file("erofs", h->layers[i], options,
					       MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV);
}

/* Attach the file to a loop device that goes away with its last user. */
static int attach_loop(const char *file)
{
	char path[32];
	int back = need(open(file, O_RDWR | O_CLOEXEC), "open", file);
	int control = need(open("/dev/loop-control", O_RDWR | O_CLOEXEC), "open", "/dev/loop-control");
	struct loop_config config = {.fd = (unsigned)back, .block_size = 4096};
	config.info.lo_flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
	for (;;) {
		int number = need(ioctl(control, LOOP_CTL_GET_FREE), "LOOP_CTL_GET_FREE", "");
		snprintf(path, sizeof path, "/dev/loop%d", number);
		int fd = need(open(path, O_RDWR | O_CLOEXEC), "open", path);
		if (ioctl(fd, LOOP_CONFIGURE, &config) == 0) {
			close(control);
			close(back);
			return fd;
		}
		if (errno != EBUSY)
			die("LOOP_CONFIGURE", path);
		close(fd); /* another program took it first */
	}
}

static void mount_pool(struct host *h)
{
	/* What the pool holds is thrown away: nothing in it is made durable. */
	static const char *const options[] = {"nobarrier", "nodatasum", "commit=300", NULL};
	int mounted = mount_open_file("btrfs", h->pool, options, MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOATIME);
	h->pool = need(openat(mounted, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), "open", "pool");
	h->pool_mount = mounted; /* closing it would dissolve the mount */
	struct btrfs_ioctl_quota_ctl_args quota = {.cmd = BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA};
	if (ioctl(h->pool, BTRFS_IOC_QUOTA_CTL, &quota) == 0)
		return;
	quota.cmd = BTRFS_QUOTA_CTL_ENABLE;
	need(ioctl(h->pool, BTRFS_IOC_QUOTA_CTL, &quota), "BTRFS_IOC_QUOTA_CTL", "pool");
}

static int make_group(struct host *h, int i, const char *mount)
{
	h->tops[i] = need(open(mount, O_RDONLY | O_DIRECTORY | O_CLOEXEC), "open", mount);
	snprintf(h->group_name, sizeof h->group_name, "dsec-limit-%d", getpid());
	need(mkdirat(h->tops[i], h->group_name, 0755), "mkdir", mount);
	return need(openat(h->tops[i], h->group_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC), "open", mount);
}

static bool has_word(const char *list, const char *word)
{
	size_t n = strlen(word);
	for (const char *at = list; (at = strstr(at, word)); at += n)
		if ((at == list || at[-1] == ',') && (!at[n] || at[n] == ','))
			return true;
	return false;
}

/* Where a controller's v1 hierarchy is mounted, or v2 when `controller` is NULL. */
static bool find_hierarchy(const char *controller, char out[128])
{
	FILE *mounts = fopen("/proc/self/mounts", "re");
	if (!mounts)
		die("open", "/proc/self/mounts");
	char at[128], type[32], options[512];
	bool found = false;
	while (!found && fscanf(mounts, "%*s %127s %31s %511s %*d %*d", at, type, options) == 3)
		found = controller ? !strcmp(type, "cgroup") && has_word(options, controller) : !strcmp(type, "cgroup2");
	fclose(mounts);
	if (found)
		memcpy(out, at, sizeof at);
	return found;
}

static void open_groups(struct host *h)
{
	char at[128];
	if (find_hierarchy(controllers[0], at)) {
		for (int i = 0; i < CONTROLLERS; i++) {
			if (!find_hierarchy(controllers[i], at))
				die("no v1 hierarchy", controllers[i]);
			h->groups[h->n_groups++] = make_group(h, i, at);
		}
		return;
	}
	if (!find_hierarchy(NULL, at))
		die("control groups", "neither v1 nor v2 is mounted");
	h->v2 = true;
	h->groups[h->n_groups++] = make_group(h, 0, at);
	put(h->tops[0], "cgroup.subtree_control", "+memory +pids +cpu");
	put(h->groups[0], "cgroup.subtree_control", "+memory +pids +cpu");
}

static void make_devices(void)
{
	static const struct {
		const char *path;
		unsigned minor;
	} nodes[] = {{"dev/null", 3}, {"dev/zero", 5}, {"dev/full", 7}, {"dev/random", 8}, {"dev/urandom", 9}};
	need(mount("dev", "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755"), "mount", "dev");
	for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
		need(mknod(nodes[i].path, S_IFCHR | 0666, makedev(1, nodes[i].minor)), "mknod", nodes[i].path);
		need(chmod(nodes[i].path, 0666), "chmod", nodes[i].path);
	}
	need(mknod("dev/tty", S_IFCHR | 0666, makedev(5, 0)), "mknod", "dev/tty");
	need(chmod("dev/tty", 0666), "chmod", "dev/tty");
	need(symlink("pts/ptmx", "dev/ptmx"), "symlink", "dev/ptmx");
	need(symlink("/proc/self/fd", "dev/fd"), "symlink", "dev/fd");
	need(mkdir("dev/pts", 0755) | mkdir("dev/shm", 0755) | mkdir("dev/mqueue", 0755), "mkdir", "dev/*");
}

/* Each clone copies the mount table of its parent: so leave it all but empty. */
static void enter_small_namespace(void)
{
	static const char root[] = "/tmp"; /* of this namespace alone: the host's is not touched */
	need(unshare(CLONE_NEWNS), "unshare", "mount namespace");
	need(mount(NULL, "/", NULL, MS_PRIVATE | MS_REC, NULL), "mount private", "/");
	need(mount("root", root, "tmpfs", 0, "mode=0755"), "mount tmpfs", root);
	need(chdir(root), "chdir", root);
	need(mkdir("proc", 0755) | mkdir("sys", 0755) | mkdir("dev", 0755) | mkdir("new", 0755), "mkdir", root);
	need(mount("/proc", "proc", NULL, MS_BIND, NULL), "bind", "/proc");
	need(mount("/sys", "sys", NULL, MS_BIND, NULL), "bind", "/sys");
	make_devices();
	need((int)syscall(SYS_pivot_root, ".", "."), "pivot_root", root);
	need(umount2(".", MNT_DETACH), "umount", "old root");
	need(chdir("/"), "chdir", "/");
}

void host_open(struct host *h, const struct options *o)
{
	h->proc = need(open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC), "open", "/proc");
	open_layers(h, o);
	h->pool = attach_loop(o->pool);
	open_groups(h);
	enter_small_namespace();
	mount_layers(h);
	mount_pool(h);
}

/* Those of sandboxes that a failed run left, and our own. */
static void remove_groups(int top, const char *name)
{
	int fd = openat(top, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	if (!dir)
		die("open group", name);
	for (struct dirent *e; (e = readdir(dir));)
		if (e->d_type == DT_DIR && e->d_name[0] != '.' && unlinkat(fd, e->d_name, AT_REMOVEDIR) < 0)
			fprintf(stderr, "limit: rmdir %s/%s: %s\n", name, e->d_name, strerror(errno));
	closedir(dir);
	need(unlinkat(top, name, AT_REMOVEDIR), "rmdir", name);
}

/* Mounts and the loop device go with their last descriptor; groups must be removed by name. */
void host_close(const struct host *h)
{
	for (int i = 0; i < h->n_groups; i++)
		remove_groups(h->tops[i], h->group_name);
}
