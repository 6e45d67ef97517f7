/* System calls that musl has no wrapper for, and small helpers around descriptors. */
#ifndef DSEC_SYS_H
#define DSEC_SYS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_open_tree
#define SYS_open_tree 428
#define SYS_move_mount 429
#define SYS_fsopen 430
#define SYS_fsconfig 431
#define SYS_fsmount 432
#endif
#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif

enum {
    K_OPEN_TREE_CLONE = 1,
    K_MOVE_MOUNT_F_EMPTY_PATH = 0x4,
    K_MOVE_MOUNT_T_EMPTY_PATH = 0x40,
    K_FSCONFIG_SET_STRING = 1,
    K_FSCONFIG_CMD_CREATE = 6,
    K_FSOPEN_CLOEXEC = 1,
    K_FSMOUNT_CLOEXEC = 1,
    K_RESOLVE_NO_MAGICLINKS = 0x02,
    K_RESOLVE_IN_ROOT = 0x10,
    K_SECBIT_NO_SETUID_FIXUP = 4,
    K_SECBIT_KEEP_CAPS = 16,
};

struct k_open_how {
    uint64_t flags, mode, resolve;
};

struct k_clone_args {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};

static inline int fd_close(int *fd)
{
    int r = *fd >= 0 ? close(*fd) : 0;
    *fd = -1;
    return r;
}

/* Whole buffer or nothing more to be had. 0, or -1 with errno. */
static inline int write_all(int fd, const void *data, size_t n)
{
    const char *p = data;
    while (n) {
        ssize_t r = write(fd, p, n);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return -1;
        p += r;
        n -= (size_t)r;
    }
    return 0;
}

static inline int open_in_root(int root, const char *path, uint64_t flags, uint64_t mode)
{
    struct k_open_how how = { .flags = flags | O_CLOEXEC, .mode = mode,
                              .resolve = K_RESOLVE_IN_ROOT | K_RESOLVE_NO_MAGICLINKS };
    return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}

#endif
