/* Run as root inside a sandbox: tries all that it can against aether (process 1). One line for each attempt:
 * its name, and `done` or the error that it met. Whether aether has survived, the test asks. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

static void told(const char *name, long result)
{
    printf("%s %s\n", name, result < 0 ? strerror(errno) : "done");
    fflush(stdout);
}

static long open_close(const char *path, int flags)
{
    int fd = open(path, flags | O_CLOEXEC);
    if (fd >= 0)
        close(fd);
    return fd;
}

/* Some of them anybody may open: it is the write that counts. */
static long write_zero(const char *path)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    long n = write(fd, "0", 1);
    int e = errno;
    close(fd);
    errno = e;
    return n;
}

static void memory(void)
{
    char byte = 0;
    struct iovec here = { &byte, 1 }, there = { (void *)0x400000, 1 };
    told("ptrace-attach", ptrace(PTRACE_ATTACH, 1, 0, 0));
    told("ptrace-seize", ptrace(PTRACE_SEIZE, 1, 0, 0));
    told("read-memory", syscall(SYS_process_vm_readv, 1, &here, 1, &there, 1, 0));
    told("write-memory", syscall(SYS_process_vm_writev, 1, &here, 1, &there, 1, 0));
    told("open-mem", open_close("/proc/1/mem", O_RDWR));
    int pidfd = (int)syscall(434 /* pidfd_open */, 1, 0);
    told("take-descriptor", pidfd < 0 ? -1 : syscall(438 /* pidfd_getfd */, pidfd, 3, 0));
    told("madvise", pidfd < 0 ? -1 : syscall(440 /* process_madvise */, pidfd, &there, 1, 4, 0));
}

static void proc_files(void)
{
    static const char *const reads[] = { "exe", "environ", "maps", "smaps", "auxv", "stack", "syscall", "io",
                                         "ns/user", "ns/mnt", "root/etc/hostname", "cwd/etc/hostname",
                                         "map_files/x", "pagemap", "personality" };
    static const char *const writes[] = { "exe", "mem", "oom_score_adj", "oom_adj", "coredump_filter", "clear_refs",
                                          "timerslack_ns", "comm", "autogroup", "sched", "uid_map", "gid_map",
                                          "setgroups", "projid_map", "loginuid", "make-it-fail", "attr/current" };
    char path[64], name[64], target[256];
    for (size_t i = 0; i < sizeof reads / sizeof *reads; i++) {
        snprintf(path, sizeof path, "/proc/1/%s", reads[i]);
        snprintf(name, sizeof name, "read-%s", reads[i]);
        told(name, open_close(path, O_RDONLY));
    }
    for (size_t i = 0; i < sizeof writes / sizeof *writes; i++) {
        snprintf(path, sizeof path, "/proc/1/%s", writes[i]);
        snprintf(name, sizeof name, "write-%s", writes[i]);
        told(name, write_zero(path));
    }
    told("link-exe", readlink("/proc/1/exe", target, sizeof target));
    told("link-root", readlink("/proc/1/root", target, sizeof target));
    told("list-fd", opendir("/proc/1/fd") ? 0 : -1);
    told("exec-exe", execl("/proc/1/exe", "aether", (char *)NULL));
}

static void limits(void)
{
    struct rlimit zero = { 0, 0 };
    struct sched_param param = { 0 };
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(0, &set);
    told("prlimit-cpu", syscall(SYS_prlimit64, 1, RLIMIT_CPU, &zero, NULL));
    told("prlimit-nofile", syscall(SYS_prlimit64, 1, RLIMIT_NOFILE, &zero, NULL));
    told("prlimit-read", syscall(SYS_prlimit64, 1, RLIMIT_AS, NULL, &zero));
    told("affinity", sched_setaffinity(1, sizeof set, &set));
    told("priority", setpriority(PRIO_PROCESS, 1, 19));
    param.sched_priority = 0;
    told("scheduler", syscall(SYS_sched_setscheduler, 1, 5 /* SCHED_IDLE */, &param));
    told("io-priority", syscall(SYS_ioprio_set, 1, 1, 3 << 13));
    told("migrate-pages", syscall(SYS_migrate_pages, 1, 64, &zero, &zero));
    told("core-scheduling", prctl(62, 2 /* share to */, 1, 0, 0));
}

static void kernel(void)
{
    told("mount", mount("none", "/tmp", "tmpfs", 0, NULL));
    told("mount-proc", mount("proc", "/tmp", "proc", 0, NULL));
    told("umount", umount2("/proc/kcore", MNT_DETACH));
    told("remount", mount(NULL, "/sys", NULL, MS_REMOUNT | MS_BIND, NULL));
    told("pivot", syscall(SYS_pivot_root, "/", "/tmp"));
    told("unshare-user", unshare(CLONE_NEWUSER));
    told("unshare-net", unshare(CLONE_NEWNET));
    told("clone-user", syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0));
    told("setns", setns(0, 0));
    told("bpf", syscall(SYS_bpf, 0, NULL, 0));
    told("perf", syscall(SYS_perf_event_open, NULL, 1, 0, -1, 0));
    told("userfaultfd", syscall(SYS_userfaultfd, 0));
    told("keyctl", syscall(SYS_keyctl, 0, -1, 0, 0, 0));
    told("io_uring", syscall(425, 8, NULL));
    told("handle", syscall(SYS_open_by_handle_at, AT_FDCWD, NULL, 0));
    told("module", syscall(SYS_init_module, NULL, 0, ""));
    told("kexec", syscall(SYS_kexec_load, 0, 0, NULL, 0));
    told("reboot", syscall(SYS_reboot, 0xfee1dead, 672274793, 0x1234567, NULL));
    told("swapoff", syscall(SYS_swapoff, "/dev/zram0"));
    told("sethostname", sethostname("x", 1));
    told("settime", syscall(SYS_settimeofday, NULL, NULL));
    told("kmsg", syscall(SYS_syslog, 3, NULL, 0));
    told("vsock", socket(40, SOCK_STREAM, 0));
    told("proc-sys", open_close("/proc/sys/kernel/core_pattern", O_WRONLY));
    told("sysrq", open_close("/proc/sysrq-trigger", O_WRONLY));
    told("cgroup", open_close("/sys/fs/cgroup/cgroup.procs", O_WRONLY));
}

/* Out of chroot by way of a descriptor: it ends at the sandbox's own root. */
static void escape(void)
{
    mkdir("/tmp/jail", 0755);
    int out = open("/", O_PATH | O_DIRECTORY);
    if (out < 0 || chroot("/tmp/jail") || fchdir(out)) {
        told("chroot", -1);
        return;
    }
    for (int i = 0; i < 64; i++)
        if (chdir(".."))
            break;
    if (chroot(".") == 0)
        told("host-root", access("/etc/inside-marker", F_OK) == 0 ? (errno = ENOENT, -1) : 0);
}

/* Signals are refused or ignored: that is seen by aether's survival alone. */
static void signals(void)
{
    union sigval v = { 0 };
    for (int s = 1; s <= 64; s++) {
        kill(1, s);
        syscall(SYS_tgkill, 1, 1, s);
        sigqueue(1, s, v);
        int pidfd = (int)syscall(434, 1, 0);
        if (pidfd >= 0) {
            syscall(424, pidfd, s, NULL, 0);
            close(pidfd);
        }
    }
    kill(-1, SIGKILL);
    kill(-1, SIGSTOP);
}

static void connections(void)
{
    FILE *f = fopen("/proc/net/unix", "r");
    char line[512];
    int named = 0;
    while (f && fgets(line, sizeof line, f))
        named += strchr(line, '/') != NULL || strchr(line, '@') != NULL;
    if (f)
        fclose(f);
    errno = ENOENT;
    told("named-sockets", named ? 0 : -1);
}

static void fork_bomb(void)
{
    for (;;)
        if (fork() < 0) {
            puts("full");
            fflush(stdout);
            for (;;)
                pause();
        }
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "bomb"))
        fork_bomb();
    if (argc == 2 && !strcmp(argv[1], "signals")) {
        signals();
        return 0;
    }
    memory();
    limits();
    kernel();
    connections();
    proc_files();
    escape();
    return 0;
}
