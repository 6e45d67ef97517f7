/* From CONFIG to the inside of the sandbox. Targets are hostile paths: they resolve below the new root only. */
#include "aether.h"

#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

static char failure[256];

static const char *failed(const char *what, const char *target)
{
    int e = errno;
    snprintf(failure, sizeof failure, "%s %s", what, target);
    errno = e;
    return failure;
}

/* Joins the sandbox's groups for the moment in which the cgroup namespace is made, so that its root is the
 * sandbox's own group. A write of 0 moves this single thread; what the file's opener may do counts, not what we may. */
static const char *cgroup_namespace(const struct config *c)
{
    for (uint32_t i = 0; i < c->joins; i++)
        if (write(c->join[i], "0", 1) != 1)
            return failed("join", "cgroup");
    if (unshare(CLONE_NEWCGROUP))
        return failed("unshare", "cgroup namespace");
    for (uint32_t i = 0; i < c->homes; i++)
        if (write(c->home[i], "0", 1) != 1)
            return failed("return to", "cgroup");
    return NULL;
}

/* A mount point below the root, whatever links lie in the way. The caller closes it. */
static int target_of(int root, const char *path)
{
    return open_in_root(root, path[0] == '/' ? path + 1 : path, O_PATH, 0);
}

static int parent_of(int root, const char *path, const char **name)
{
    char dir[1024];
    const char *slash = strrchr(path, '/');
    *name = slash ? slash + 1 : path;
    size_t n = slash ? (size_t)(slash - path) : 0;
    if (n >= sizeof dir || !**name) {
        errno = EINVAL;
        return -1;
    }
    memcpy(dir, path, n);
    dir[n] = 0;
    const char *relative = dir[0] == '/' ? dir + 1 : dir;
    return open_in_root(root, *relative ? relative : ".", O_PATH | O_DIRECTORY, 0);
}

static void through_proc(char out[64], int fd)
{
    snprintf(out, 64, "/proc/self/fd/%d", fd);
}

static int attach_at(int mount_fd, int target)
{
    return (int)syscall(SYS_move_mount, mount_fd, "", target, "",
                        K_MOVE_MOUNT_F_EMPTY_PATH | K_MOVE_MOUNT_T_EMPTY_PATH);
}

static int mount_at(int target, const struct step *s)
{
    char path[64];
    through_proc(path, target);
    return mount(s->source, path, s->source, (unsigned long)s->flags, s->data);
}

static int bind_on_itself(int target)
{
    char path[64];
    through_proc(path, target);
    return mount(path, path, NULL, MS_BIND | MS_REC, NULL);
}

/* A second look at the path finds the new mount on top of the old directory. */
static int seal(int root, const struct step *s)
{
    int top = target_of(root, s->target);
    if (top < 0)
        return -1;
    char path[64];
    through_proc(path, top);
    int r = mount(NULL, path, NULL,
                  MS_BIND | MS_REMOUNT | MS_RDONLY | (unsigned long)s->flags, NULL);
    close(top);
    return r;
}

static int mask_at(int target)
{
    struct stat st;
    char path[64];
    through_proc(path, target);
    if (fstat(target, &st))
        return -1;
    if (S_ISDIR(st.st_mode))
        return mount("tmpfs", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=0k,nr_inodes=2");
    return mount("/dev/null", path, NULL, MS_BIND, NULL);
}

static int make_entry(int root, const struct step *s)
{
    const char *name;
    int dir = parent_of(root, s->target, &name);
    if (dir < 0)
        return -1;
    int r = -1;
    if (!strcmp(s->op, "mkdir")) {
        r = mkdirat(dir, name, (mode_t)s->flags);
    } else if (!strcmp(s->op, "symlink")) {
        r = symlinkat(s->source, dir, name);
    } else {
        int fd = openat(dir, name, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, (mode_t)s->flags);
        r = fd < 0 ? -1 : write_all(fd, s->source, strlen(s->source));
        if (fd >= 0)
            close(fd);
    }
    if (r < 0 && errno == EEXIST && strcmp(s->op, "file"))
        r = 0;
    int e = errno;
    close(dir);
    errno = e;
    return r;
}

static int on_target(int root, const struct step *s)
{
    bool optional = !strcmp(s->op, "mask") || !strcmp(s->op, "readonly");
    int target = target_of(root, s->target);
    if (target < 0)
        return optional && (errno == ENOENT || errno == ENOTDIR) ? 0 : -1;
    int r = -1;
    if (!strcmp(s->op, "attach"))
        r = attach_at((int)s->flags, target);
    else if (!strcmp(s->op, "mount"))
        r = mount_at(target, s);
    else if (!strcmp(s->op, "mask"))
        r = mask_at(target);
    else if (!strcmp(s->op, "readonly"))
        r = bind_on_itself(target) ? -1 : seal(root, s);
    else
        errno = EINVAL;
    int e = errno;
    close(target);
    errno = e;
    return r;
}

static int run_step(int root, const struct step *s)
{
    bool entry = !strcmp(s->op, "mkdir") || !strcmp(s->op, "symlink") || !strcmp(s->op, "file");
    return entry ? make_entry(root, s) : on_target(root, s);
}

/* A procfs of our own, unmasked, that no path leads to. It must be made while the host's is still visible. */
static int private_proc(void)
{
    int fs = (int)syscall(SYS_fsopen, "proc", K_FSOPEN_CLOEXEC);
    if (fs < 0)
        return -1;
    int fd = -1;
    if (syscall(SYS_fsconfig, fs, K_FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
        fd = (int)syscall(SYS_fsmount, fs, K_FSMOUNT_CLOEXEC, MS_NOSUID | MS_NODEV | MS_NOEXEC);
    int e = errno;
    close(fs);
    errno = e;
    return fd;
}

static int loopback_up(void)
{
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    struct ifreq r = { .ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING };
    int result = ioctl(fd, SIOCSIFFLAGS, &r);
    close(fd);
    return result;
}

static const char *change_root(int root)
{
    if (fchdir(root) || syscall(SYS_pivot_root, ".", "."))
        return failed("pivot_root", "");
    if (umount2(".", MNT_DETACH) || chdir("/"))
        return failed("detach", "old root");
    return NULL;
}

const char *enter(struct config *c)
{
    /* Files that we make belong to root inside; euid and ruid stay outside of the map. */
    syscall(SYS_setfsuid, 0);
    syscall(SYS_setfsgid, 0);
    umask(0);
    const char *why = cgroup_namespace(c);
    if (why)
        return why;
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return failed("make private", "/");
    if ((self.proc = private_proc()) < 0)
        return failed("mount", "proc");
    /* Any directory of the host but /proc serves as a place for the new root: steps go through /proc/self/fd. */
    int place = open("/sys", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (place < 0 || attach_at(c->root, place))
        return failed("attach", "root");
    close(place);
    for (uint32_t i = 0; i < c->n_steps; i++)
        if (run_step(c->root, &c->steps[i]))
            return failed(c->steps[i].op, c->steps[i].target);
    if ((why = change_root(c->root)))
        return why;
    self.root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (sethostname(c->hostname, strlen(c->hostname)))
        return failed("sethostname", c->hostname);
    if (c->loopback && loopback_up())
        return failed("bring up", "lo");
    if (prctl(PR_SET_DUMPABLE, 0))
        return failed("prctl", "dumpable");
    return NULL;
}
