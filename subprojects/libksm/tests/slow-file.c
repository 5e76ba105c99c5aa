/*
 * libksm tests: a file that is read as slowly as a test wants
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <glib.h>

#include "slow-file.h"

#define FILE_NODE   2
#define READ_MAX    (1u << 20)
#define REQUEST_MAX (READ_MAX + 4096)
#define HELD_MAX    16
#define VALID_S     86400   /* attributes: nobody has to ask us again */

struct SlowFileState {
    int hold;               /* atomic: reads are to wait */
    int held;               /* atomic: so many do */
};

/* The child's. */
typedef struct Server {
    int fd;                 /* /dev/fuse */
    size_t size;
    SlowFileState *state;
    struct Held {
        uint64_t unique;
        size_t len;
    } held[HELD_MAX];
    char data[READ_MAX];
} Server;

static void reply(Server *s, uint64_t unique, const void *data, size_t len,
                  int error)
{
    struct fuse_out_header out = {
        .len = sizeof(out) + len,
        .error = error,
        .unique = unique,
    };
    struct iovec iov[2] = {
        { &out, sizeof(out) },
        { (void *)data, len },
    };

    if (writev(s->fd, iov, len ? 2 : 1) < 0 && errno != ENOENT) {
        g_error("FUSE reply: %s", g_strerror(errno));
    }
}

static struct fuse_attr attributes(const Server *s, uint64_t node)
{
    return (struct fuse_attr) {
        .ino = node,
        .size = node == FILE_NODE ? s->size : 0,
        .mode = node == FILE_NODE ? S_IFREG | 0644 : S_IFDIR | 0755,
        .nlink = 1,
        .blksize = 4096,
    };
}

static void answer_read(Server *s, const struct fuse_in_header *in)
{
    const struct fuse_read_in *read = (const void *)(in + 1);
    size_t len = read->offset >= s->size ? 0
               : MIN(read->size, s->size - read->offset);
    int held = s->state->held;

    len = MIN(len, READ_MAX);
    if (__atomic_load_n(&s->state->hold, __ATOMIC_ACQUIRE) &&
        held < HELD_MAX) {
        s->held[held] = (struct Held) { in->unique, len };
        __atomic_store_n(&s->state->held, held + 1, __ATOMIC_RELEASE);
    } else {
        reply(s, in->unique, s->data, len, 0);
    }
}

static void answer(Server *s, const struct fuse_in_header *in)
{
    struct fuse_init_out init = {
        .major = FUSE_KERNEL_VERSION,
        .minor = 31,
        .max_write = 4096,
        .flags = FUSE_ASYNC_READ | FUSE_ASYNC_DIO,
    };
    struct fuse_entry_out entry = {
        .nodeid = FILE_NODE,
        .entry_valid = VALID_S,
        .attr_valid = VALID_S,
        .attr = attributes(s, FILE_NODE),
    };
    struct fuse_attr_out attr = {
        .attr_valid = VALID_S,
        .attr = attributes(s, in->nodeid),
    };
    struct fuse_open_out opened = { .open_flags = FOPEN_DIRECT_IO };

    switch (in->opcode) {
    case FUSE_INIT:
        reply(s, in->unique, &init, sizeof(init), 0);
        break;
    case FUSE_LOOKUP:
        reply(s, in->unique, &entry, sizeof(entry), 0);
        break;
    case FUSE_GETATTR:
        reply(s, in->unique, &attr, sizeof(attr), 0);
        break;
    case FUSE_OPEN:
        reply(s, in->unique, &opened, sizeof(opened), 0);
        break;
    case FUSE_READ:
        answer_read(s, in);
        break;
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT:
        break;
    case FUSE_FLUSH:
    case FUSE_RELEASE:
        reply(s, in->unique, NULL, 0, 0);
        break;
    default:
        reply(s, in->unique, NULL, 0, -ENOSYS);
        break;
    }
}

static void answer_held(Server *s)
{
    int held = s->state->held;

    __atomic_store_n(&s->state->held, 0, __ATOMIC_RELEASE);
    for (int i = 0; i < held; i++) {
        reply(s, s->held[i].unique, s->data, s->held[i].len, 0);
    }
}

static void G_GNUC_NORETURN serve(int fd, size_t size, SlowFileState *state)
{
    Server *s = g_new0(Server, 1);
    char *request = g_malloc(REQUEST_MAX);

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    s->fd = fd;
    s->size = size;
    s->state = state;
    memset(s->data, SLOW_FILE_BYTE, sizeof(s->data));
    for (;;) {
        struct pollfd poller = { .fd = fd, .events = POLLIN };
        ssize_t got;

        if (s->state->held &&
            !__atomic_load_n(&state->hold, __ATOMIC_ACQUIRE)) {
            answer_held(s);
        }
        if (poll(&poller, 1, state->held ? 1 : -1) == 0) {
            continue;
        }
        got = read(fd, request, REQUEST_MAX);
        if (got < 0 && (errno == EINTR || errno == ENOENT)) {
            continue;
        }
        if (got < 0) {
            /* unmounted */
            _exit(0);
        }
        answer(s, (struct fuse_in_header *)request);
    }
}

const char *slow_file_open(SlowFile *f, size_t size)
{
    g_autofree char *options = NULL;
    g_autofree char *dir = NULL;
    g_autofree char *path = NULL;
    int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);

    if (fd < 0) {
        return "/dev/fuse cannot be opened";
    }
    dir = g_dir_make_tmp("libksm-XXXXXX", NULL);
    g_assert(dir);
    options = g_strdup_printf("fd=%d,rootmode=40000,user_id=%d,group_id=%d",
                              fd, getuid(), getgid());
    if (mount("libksm-test", dir, "fuse", MS_NOSUID | MS_NODEV, options)) {
        rmdir(dir);
        close(fd);
        return "FUSE cannot be mounted (CAP_SYS_ADMIN is missing)";
    }
    f->state = mmap(NULL, sizeof(*f->state), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    g_assert(f->state != MAP_FAILED);
    f->server = fork();
    if (f->server == 0) {
        serve(fd, size, f->state);
    }
    g_assert(f->server > 0);
    close(fd);
    path = g_build_filename(dir, "file", NULL);
    f->file = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    g_assert(f->file >= 0);
    g_assert(umount2(dir, MNT_DETACH) == 0);
    rmdir(dir);
    return NULL;
}

void slow_file_close(SlowFile *f)
{
    close(f->file);
    g_assert(waitpid(f->server, NULL, 0) == f->server);
    munmap(f->state, sizeof(*f->state));
}

void slow_file_hold(SlowFile *f)
{
    __atomic_store_n(&f->state->hold, 1, __ATOMIC_RELEASE);
}

void slow_file_wait(SlowFile *f)
{
    for (int i = 0; i < 60000; i++) {
        if (__atomic_load_n(&f->state->held, __ATOMIC_ACQUIRE)) {
            return;
        }
        g_usleep(1000);
    }
    g_error("nobody reads the slow file");
}

void slow_file_release(SlowFile *f)
{
    __atomic_store_n(&f->state->hold, 0, __ATOMIC_RELEASE);
}
