/* Faults at an exact call: preloaded into the process under test, armed by it through ctypes.
 * Counts writes, syncs, renames, removals and new directories under one path, and strikes at the n-th. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { COUNT, KILL_BEFORE, KILL_AFTER, NO_SPACE, TERMINATE, TERMINATE_TWICE };

static char prefix[PATH_MAX];
static long target = -1;
static int action = COUNT;
static atomic_long calls = 0;

void fault_arm(const char *path, long nth, int what) {
    snprintf(prefix, sizeof prefix, "%s", path);
    target = nth;
    action = what;
    atomic_store(&calls, 0);
}

long fault_calls(void) { return atomic_load(&calls); }

static int inside(int dirfd, const char *path) {
    char base[PATH_MAX], whole[2 * PATH_MAX], link[64];
    ssize_t n;
    if (!prefix[0]) return 0;
    if (path && path[0] == '/') return strncmp(path, prefix, strlen(prefix)) == 0;
    if (dirfd == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
    n = readlink(link, base, sizeof base - 1);
    if (n < 0) return 0;
    base[n] = 0;
    snprintf(whole, sizeof whole, "%s%s%s", base, path ? "/" : "", path ? path : "");
    return strncmp(whole, prefix, strlen(prefix)) == 0;
}

static void die(const char *name) {
    dprintf(2, "struck at %s\n", name);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Whether this call is the one; signals are sent here, since the call itself then goes on. */
static int strike(int dirfd, const char *path, const char *name) {
    long now;
    if (!inside(dirfd, path)) return 0;
    now = atomic_fetch_add(&calls, 1) + 1;
    if (action == COUNT) dprintf(2, "call %s\n", name);
    if (action == NO_SPACE) return now >= target && strncmp(name, "unlink", 6) && strcmp(name, "rmdir");
    if ((action == TERMINATE || action == TERMINATE_TWICE) && now == target) kill(getpid(), SIGTERM);
    if (action == TERMINATE_TWICE && now == target) {
        usleep(500000); /* or the two would be taken for one */
        kill(getpid(), SIGTERM);
        usleep(1000000); /* the save must not be over before the signal is noticed */
    }
    if (action == KILL_BEFORE && now == target) die(name);
    return now == target && action == KILL_AFTER;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    if (fd > 2 && strike(fd, NULL, "write")) {
        if (action == NO_SPACE) { errno = ENOSPC; return -1; }
        real(fd, data, size / 2); /* torn */
        die("write");
    }
    return real(fd, data, size);
}

#define PLAIN(ret, name, params, args, dirfd, path)            \
    ret name params {                                          \
        ret result;                                            \
        REAL(name);                                            \
        int hit = strike(dirfd, path, #name);                  \
        if (hit && action == NO_SPACE) { errno = ENOSPC; return -1; } \
        result = real args;                                    \
        if (hit) die(#name);                                   \
        return result;                                         \
    }

PLAIN(int, fsync, (int fd), (fd), fd, NULL)
PLAIN(int, fdatasync, (int fd), (fd), fd, NULL)
PLAIN(int, rename, (const char *from, const char *to), (from, to), AT_FDCWD, to)
PLAIN(int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), b, to)
PLAIN(int, mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path)
PLAIN(int, unlink, (const char *path), (path), AT_FDCWD, path)
PLAIN(int, unlinkat, (int fd, const char *path, int flags), (fd, path, flags), fd, path)
PLAIN(int, rmdir, (const char *path), (path), AT_FDCWD, path)
