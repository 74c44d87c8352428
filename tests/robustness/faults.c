// SPDX-License-Identifier: Apache-2.0
// Fault injection for file operations, as a library for LD_PRELOAD. Only paths below one directory are affected.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN_READ = 1, OPEN_WRITE = 2, READ = 4, WRITE = 8, SYNC = 16, RENAME = 32, MKDIR = 64, UNLINK = 128,
       RESIZE = 256, LINK = 512 };
enum { MAX_FD = 65536, SHORT = -1 };

static char root[PATH_MAX];
static unsigned char tracked[MAX_FD];
static int kinds, error_number, persistent;
static long nth, calls;

// Fail the n-th operation of the given kinds (all from the n-th on if `lasting`); n = 0 counts alone.
void faults_arm(const char *directory, int which, long n, int number, int lasting) {
    strncpy(root, directory, sizeof root - 1);
    kinds = which, nth = n, error_number = number, persistent = lasting, calls = 0;
}

long faults_calls(void) { return calls; }
void faults_disarm(void) { kinds = 0; }

static int below(int directory, const char *path) {
    char whole[PATH_MAX];
    if (!*root || !path) return 0;
    if (path[0] != '/') {
        if (directory != AT_FDCWD) return directory >= 0 && directory < MAX_FD && tracked[directory];
        if (!getcwd(whole, sizeof whole)) return 0;
        path = whole;
    }
    size_t length = strlen(root);
    return !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

// 1: fail with error_number. The count is not exact when threads race, which does not matter here.
static int due(int kind) {
    if (!(kinds & kind)) return 0;
    long call = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    return nth && (call == nth || (persistent && call > nth));
}

static int fails(int kind) {
    if (!due(kind)) return 0;
    errno = error_number;
    return 1;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define OWN(fd) ((fd) >= 0 && (fd) < MAX_FD && tracked[fd])

static int kind_of(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT) ? OPEN_WRITE : OPEN_READ; }

static int track(int fd, int own) {
    if (fd >= 0 && fd < MAX_FD) tracked[fd] = own;
    return fd;
}

#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); \
    mode = va_arg(rest, mode_t); va_end(rest); }
#define OPEN(name) int name(const char *path, int flags, ...) { REAL(name); MODE(flags); int own = below(AT_FDCWD, path); \
    if (own && !(flags & O_DIRECTORY) && fails(kind_of(flags))) return -1; return track(real(path, flags, mode), own); }
#define OPENAT(name) int name(int dir, const char *path, int flags, ...) { REAL(name); MODE(flags); \
    int own = below(dir, path); if (own && !(flags & O_DIRECTORY) && fails(kind_of(flags))) return -1; \
    return track(real(dir, path, flags, mode), own); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

#define FOPEN(name) FILE *name(const char *path, const char *mode) { REAL(name); int own = below(AT_FDCWD, path); \
    if (own && fails(mode[0] == 'r' && !strchr(mode, '+') ? OPEN_READ : OPEN_WRITE)) return NULL; \
    FILE *file = real(path, mode); if (file) track(fileno(file), own); return file; }
FOPEN(fopen) FOPEN(fopen64)

int close(int fd) { REAL(close); if (fd >= 0 && fd < MAX_FD) tracked[fd] = 0; return real(fd); }
int fclose(FILE *file) { REAL(fclose); track(fileno(file), 0); return real(file); }
int dup(int fd) { REAL(dup); int own = OWN(fd); return track(real(fd), own); }

// A short transfer moves half of the bytes, at least one.
#define TRANSFER(name, type, kind, arguments, half, ...) ssize_t name arguments { REAL(name); \
    if (OWN(fd) && due(kind)) { if (error_number != SHORT) { errno = error_number; return -1; } half; } \
    return real(__VA_ARGS__); }
#define HALF size = size > 1 ? size / 2 : size
TRANSFER(read, ssize_t, READ, (int fd, void *to, size_t size), HALF, fd, to, size)
TRANSFER(pread, ssize_t, READ, (int fd, void *to, size_t size, off_t at), HALF, fd, to, size, at)
TRANSFER(pread64, ssize_t, READ, (int fd, void *to, size_t size, off64_t at), HALF, fd, to, size, at)
TRANSFER(write, ssize_t, WRITE, (int fd, const void *from, size_t size), HALF, fd, from, size)
TRANSFER(pwrite, ssize_t, WRITE, (int fd, const void *from, size_t size, off_t at), HALF, fd, from, size, at)
TRANSFER(pwrite64, ssize_t, WRITE, (int fd, const void *from, size_t size, off64_t at), HALF, fd, from, size, at)
TRANSFER(writev, ssize_t, WRITE, (int fd, const struct iovec *from, int count), count = count > 1 ? count / 2 : count,
         fd, from, count)
TRANSFER(sendfile, ssize_t, WRITE, (int fd, int from, off_t *at, size_t size), HALF, fd, from, at, size)
TRANSFER(sendfile64, ssize_t, WRITE, (int fd, int from, off64_t *at, size_t size), HALF, fd, from, at, size)

#define ON_FILE(name, kind, arguments, ...) int name arguments { REAL(name); if (OWN(fd) && fails(kind)) return -1; \
    return real(__VA_ARGS__); }
ON_FILE(fsync, SYNC, (int fd), fd)
ON_FILE(fdatasync, SYNC, (int fd), fd)
ON_FILE(ftruncate, RESIZE, (int fd, off_t size), fd, size)
ON_FILE(ftruncate64, RESIZE, (int fd, off64_t size), fd, size)
int posix_fallocate(int fd, off_t at, off_t size) {  // returns the error
    REAL(posix_fallocate);
    return OWN(fd) && due(RESIZE) ? error_number : real(fd, at, size);
}
int posix_fallocate64(int fd, off64_t at, off64_t size) {
    REAL(posix_fallocate64);
    return OWN(fd) && due(RESIZE) ? error_number : real(fd, at, size);
}

#define ON_PATH(name, kind, arguments, dir, path, ...) int name arguments { REAL(name); \
    if (below(dir, path) && fails(kind)) return -1; return real(__VA_ARGS__); }
ON_PATH(rename, RENAME, (const char *from, const char *to), AT_FDCWD, to, from, to)
ON_PATH(renameat, RENAME, (int a, const char *from, int b, const char *to), b, to, a, from, b, to)
ON_PATH(mkdir, MKDIR, (const char *path, mode_t mode), AT_FDCWD, path, path, mode)
ON_PATH(mkdirat, MKDIR, (int dir, const char *path, mode_t mode), dir, path, dir, path, mode)
ON_PATH(unlink, UNLINK, (const char *path), AT_FDCWD, path, path)
ON_PATH(unlinkat, UNLINK, (int dir, const char *path, int flags), dir, path, dir, path, flags)
ON_PATH(rmdir, UNLINK, (const char *path), AT_FDCWD, path, path)
ON_PATH(link, LINK, (const char *from, const char *to), AT_FDCWD, to, from, to)
ON_PATH(linkat, LINK, (int a, const char *from, int b, const char *to, int flags), b, to, a, from, b, to, flags)
ON_PATH(symlink, LINK, (const char *to, const char *path), AT_FDCWD, path, to, path)
