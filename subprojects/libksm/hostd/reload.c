/*
 * reload: the daemon goes on as another program
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/prim.h"
#include "client.h"
#include "image.h"
#include "reload.h"
#include "sys.h"
#include "work.h"

#define VARIABLE    "KSM_POOLD_IMAGE"
#define NO_MEMBER   UINT32_MAX

typedef struct SavedServer {
    uint64_t generation, key, began, file_slots;
    uint32_t slots, max_holds, top, patterns, members, clients;
    int32_t listener, fd, map_fd, kind, keeps_all;
    uint32_t asked_buckets;
    uint64_t gone[ASKED_MEMBERS / 64];
    GroupStats stats;
} SavedServer;

typedef struct SavedMember {
    uint32_t number, pid, released, leaves, lists;
    int32_t pidfd, ring;
    uint32_t missed;
    uint64_t pages, charged, heard, cookie[2];
    WireLeft left;
    char name[64];
} SavedMember;

typedef struct SavedClient {
    int32_t fd;
    uint32_t member, asks_status, waiting;
} SavedClient;

typedef struct SavedPacket {
    uint32_t len, n_fds;
    int32_t fds[CONN_FDS_MAX];
} SavedPacket;

G_STATIC_ASSERT(sizeof(SavedMember) == 160);
G_STATIC_ASSERT(sizeof(SavedClient) == 16);

static char **arguments;
static char program[PATH_MAX];

void reload_prepare(char **argv)
{
    int len = sys.program(program, sizeof(program) - 1);

    program[MAX(len, 0)] = '\0';
    arguments = argv;
}

static void put_holds(Image *im, const Holds *h, uint32_t top)
{
    WirePair pair[1024];
    uint32_t n = h->held, k = 0;

    image_put(im, &n, sizeof(n));
    for (uint32_t s = holds_next(h, 0, top); s < top;
         s = holds_next(h, s + 1, top)) {
        pair[k++] = (WirePair) { s, holds_of(h, s) };
        if (k == G_N_ELEMENTS(pair)) {
            image_put(im, pair, sizeof(pair));
            k = 0;
        }
    }
    image_put(im, pair, k * sizeof(*pair));
}

static void get_holds(Image *im, Holds *h, uint32_t top)
{
    g_autofree WirePair *pair = NULL;
    uint32_t n;

    image_get(im, &n, sizeof(n));
    if (n > top) {
        im->error = -EPROTO;
        return;
    }
    pair = g_new(WirePair, n);
    image_get(im, pair, n * sizeof(*pair));
    for (uint32_t i = 0; i < n && im->error == 0; i++) {
        if (pair[i].slot >= top || pair[i].holds == 0) {
            im->error = -EPROTO;
        } else {
            holds_add_many(h, pair[i].slot, pair[i].holds);
        }
    }
}

static void put_member(Image *im, const Member *m, uint32_t top)
{
    SavedMember saved = {
        .number = m->held.number,
        .pid = m->pid,
        .released = m->held.released,
        .leaves = !m->exit_watch,
        .lists = m->listed != NULL,
        .missed = m->missed,
        .pidfd = m->pidfd,
        .ring = m->ring,
        .pages = m->held.pages,
        .charged = m->held.charged,
        .heard = m->heard,
        .left = m->left,
        .cookie = { m->cookie[0], m->cookie[1] },
    };

    memcpy(saved.name, m->name, sizeof(saved.name));
    image_put(im, &saved, sizeof(saved));
    put_holds(im, &m->held.holds, top);
    if (m->listed) {
        put_holds(im, m->listed, top);
    }
}

static void put_packet(void *opaque, const void *data, size_t len,
                       const int *fds, unsigned n_fds)
{
    SavedPacket saved = { .len = len, .n_fds = n_fds };

    memcpy(saved.fds, fds, n_fds * sizeof(*fds));
    image_put(opaque, &saved, sizeof(saved));
    image_put(opaque, data, len);
}

static void put_client(Image *im, const Client *c)
{
    SavedClient saved = {
        .fd = conn_fd(c->conn),
        .member = c->member ? c->member->held.number : NO_MEMBER,
        .asks_status = c->asks_status,
        .waiting = conn_n_waiting(c->conn),
    };

    image_put(im, &saved, sizeof(saved));
    conn_each_waiting(c->conn, put_packet, im);
}

static void put_patterns(Image *im, const KsmPool *p)
{
    GHashTableIter iter;
    gpointer t;

    g_hash_table_iter_init(&iter, p->patterns);
    while (g_hash_table_iter_next(&iter, NULL, &t)) {
        const KsmPattern *pattern = t;
        uint32_t saved[2] = { pattern->first, pattern->filled };

        image_put(im, saved, sizeof(saved));
    }
}

static void put_server(Image *im, const Server *s)
{
    const Group *g = &s->group;
    SavedServer saved = {
        .generation = s->generation,
        .key = g->config.key,
        .began = s->began,
        .file_slots = g->pool.file_slots,
        .slots = g->config.slots,
        .max_holds = g->config.max_holds,
        .top = g->pool.top,
        .patterns = g_hash_table_size(g->pool.patterns),
        .members = g->members,
        .clients = s->clients->len,
        .listener = s->listener,
        .fd = s->file.fd,
        .map_fd = s->file.map_fd,
        .kind = s->file.kind,
        .keeps_all = s->group.pool.keep_all,
        .asked_buckets = g->asked.n,
        .stats = g->stats,
    };

    memcpy(saved.gone, g->asked.gone, sizeof(saved.gone));
    image_put(im, &saved, sizeof(saved));
    image_put(im, g->pool.hash, saved.top * sizeof(*g->pool.hash));
    image_put(im, g->pool.users, saved.top * sizeof(*g->pool.users));
    image_put(im, g->upper, saved.top * sizeof(*g->upper));
    image_put(im, g->owner, saved.top * sizeof(*g->owner));
    put_patterns(im, &g->pool);
    image_put(im, g->asked.bucket,
              g->asked.n * sizeof(AskedBucket));
    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        if (g->member[i]) {
            put_member(im, (Member *)g->member[i], saved.top);
        }
    }
    for (unsigned i = 0; i < s->clients->len; i++) {
        put_client(im, s->clients->pdata[i]);
    }
}

typedef enum Inherit { CLOSE_ON_EXEC, STAY_OPEN } Inherit;

static void set_inherit(int fd, Inherit inherit)
{
    sys.inherit(fd, inherit == STAY_OPEN);
}

static void set_all_inherit(const Server *s, Inherit inherit)
{
    set_inherit(s->listener, inherit);
    set_inherit(s->file.fd, inherit);
    set_inherit(s->file.map_fd, inherit);
    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        Member *m = (Member *)s->group.member[i];

        if (m) {
            set_inherit(m->pidfd, inherit);
            set_inherit(m->ring, inherit);
        }
    }
    for (unsigned i = 0; i < s->clients->len; i++) {
        set_inherit(conn_fd(((Client *)s->clients->pdata[i])->conn), inherit);
    }
}

/*
 * Only one table of what was asked, nothing to be punched, and nobody who has
 * listed all it holds.
 */
static void settle(Server *s)
{
    while (client_reconcile_step(s)) {
        continue;
    }
    while (s->group.asked.was || s->group.asked.sweeps) {
        asked_step(&s->group.asked);
    }
    pool_flush(&s->group.pool);
}

static int execute(Server *s, int image)
{
    g_autofree char *number = g_strdup_printf("%d", image);
    int ret;

    g_setenv(VARIABLE, number, TRUE);
    set_all_inherit(s, STAY_OPEN);
    set_inherit(image, STAY_OPEN);
    ret = sys.execute(program, arguments);
    set_all_inherit(s, CLOSE_ON_EXEC);
    g_unsetenv(VARIABLE);
    return ret;
}

/*
 * What the image takes, about; the successor needs as much as we do, and what
 * one member holds once more.
 */
static uint64_t image_bytes(const Server *s)
{
    const Group *g = &s->group;
    uint64_t most = 0, sum = (uint64_t)g->pool.top *
                             (sizeof(*g->pool.hash) + sizeof(*g->pool.users) +
                              sizeof(*g->upper) + sizeof(*g->owner)) +
                             g->asked.n * sizeof(AskedBucket);

    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        const Member *m = (const Member *)g->member[i];
        uint64_t held = m ? m->held.holds.held * sizeof(WirePair) : 0;

        sum += m && m->listed ? 2 * held : held;
        most = MAX(most, held);
    }
    for (unsigned i = 0; i < s->clients->len; i++) {
        sum += conn_queued(((Client *)s->clients->pdata[i])->conn);
    }
    return sum + most;
}

int reload_exec(Server *s)
{
    Image im;
    int ret;

    settle(s);
    if (!memcg_has_room(&s->group.memcg, image_bytes(s))) {
        return -ENOMEM;
    }
    ret = image_begin(&im);
    if (ret < 0) {
        return ret;
    }
    put_server(&im, s);
    ret = image_finish(&im);
    if (ret == 0) {
        ret = execute(s, im.fd);
    }
    prim.close(im.fd);
    return ret;
}

bool reload_is(void)
{
    return g_getenv(VARIABLE) != NULL;
}

static int get_patterns(Image *im, const SavedServer *saved, KsmPool *p)
{
    for (uint32_t i = 0; i < saved->patterns && im->error == 0; i++) {
        uint32_t first_filled[2];
        uint32_t first, filled;

        image_get(im, first_filled, sizeof(first_filled));
        first = first_filled[0];
        filled = first_filled[1];
        if (im->error == 0 &&
            (first % CHUNK_PAGES || filled > CHUNK_PAGES || filled == 0 ||
             saved->top < CHUNK_PAGES || first > saved->top - CHUNK_PAGES ||
             !(p->users[first] & SLOT_PATTERN))) {
            im->error = -EPROTO;
        }
        if (im->error == 0) {
            pool_adopt_pattern(p, first, filled);
        }
    }
    return im->error;
}

static int get_group(Image *im, const SavedServer *saved, Group *g)
{
    if (saved->top > g->config.slots ||
        asked_resize(&g->asked, saved->asked_buckets) < 0) {
        return -EPROTO;
    }
    g->stats = saved->stats;
    image_get(im, g->pool.hash, saved->top * sizeof(*g->pool.hash));
    image_get(im, g->pool.users, saved->top * sizeof(*g->pool.users));
    image_get(im, g->upper, saved->top * sizeof(*g->upper));
    image_get(im, g->owner, saved->top * sizeof(*g->owner));
    if (get_patterns(im, saved, &g->pool) < 0) {
        return im->error;
    }
    image_get(im, g->asked.bucket,
              g->asked.n * sizeof(AskedBucket));
    asked_count(&g->asked);
    memcpy(g->asked.gone, saved->gone, sizeof(saved->gone));
    return im->error;
}

static void member_fill(Member *m, const SavedMember *saved)
{
    m->pid = saved->pid;
    m->pidfd = saved->pidfd;
    m->ring = saved->ring;
    m->heard = saved->heard;
    m->left = saved->left;
    m->missed = saved->missed;
    memcpy(m->cookie, saved->cookie, sizeof(m->cookie));
    memcpy(m->name, saved->name, sizeof(m->name));
    m->news = g_array_new(FALSE, FALSE, sizeof(WireFound));
}

static int get_member(Image *im, Server *s, uint32_t top)
{
    SavedMember saved;
    Member *m = g_new0(Member, 1);
    int ret;

    image_get(im, &saved, sizeof(saved));
    ret = im->error < 0 ? im->error
          : group_rejoin(&s->group, &m->held, saved.number);
    if (ret < 0) {
        g_free(m);
        return ret;
    }
    member_fill(m, &saved);
    m->held.pages = saved.pages;
    m->held.charged = saved.charged;
    m->held.released = saved.released;
    get_holds(im, &m->held.holds, top);
    if (saved.lists) {
        m->listed = g_new0(Holds, 1);
        ret = holds_init(m->listed, s->group.config.slots);
        if (ret < 0) {
            return ret;
        }
        get_holds(im, m->listed, top);
    }
    if (saved.leaves) {
        g_ptr_array_add(s->leaving, m);
    }
    return im->error;
}

/* What was waiting to be sent waits in @packets until all is good. */
typedef struct GotClient {
    SavedClient saved;
    GPtrArray *data;        /* of GBytes: SavedPacket and the packet */
} GotClient;

static void got_client_clear(gpointer data)
{
    g_ptr_array_unref(((GotClient *)data)->data);
}

static void get_client(Image *im, GArray *clients)
{
    GotClient c = {
        .data = g_ptr_array_new_with_free_func((GDestroyNotify)g_bytes_unref),
    };

    image_get(im, &c.saved, sizeof(c.saved));
    for (uint32_t i = 0; i < c.saved.waiting && im->error == 0; i++) {
        SavedPacket head;
        char *all;

        image_get(im, &head, sizeof(head));
        if (head.len > WIRE_MESSAGE_MAX || head.n_fds > CONN_FDS_MAX) {
            im->error = -EPROTO;
            break;
        }
        all = g_malloc(sizeof(head) + head.len);
        memcpy(all, &head, sizeof(head));
        image_get(im, all + sizeof(head), head.len);
        g_ptr_array_add(c.data, g_bytes_new_take(all,
                                                 sizeof(head) + head.len));
    }
    g_array_append_val(clients, c);
}

static void client_resume(Server *s, const GotClient *got)
{
    Client *c = server_connect(s, got->saved.fd);

    c->asks_status = got->saved.asks_status;
    if (got->saved.member != NO_MEMBER) {
        c->member = (Member *)s->group.member[got->saved.member];
        c->member->conn = c->conn;
    }
    for (unsigned i = 0; i < got->data->len; i++) {
        const char *all = g_bytes_get_data(got->data->pdata[i], NULL);
        SavedPacket head;

        memcpy(&head, all, sizeof(head));
        conn_send_fds(c->conn, all + sizeof(head), head.len, head.fds,
                      head.n_fds);
    }
}

static int clients_check(const Server *s, const GArray *clients)
{
    for (unsigned i = 0; i < clients->len; i++) {
        uint32_t m = g_array_index(clients, GotClient, i).saved.member;

        if (m != NO_MEMBER && (m >= ASKED_MEMBERS || !s->group.member[m])) {
            return -EPROTO;
        }
    }
    return 0;
}

/* All is read and fits: from here on nothing fails. */
static void go_on(Server *s, const SavedServer *saved, const GArray *clients)
{
    s->generation = saved->generation;
    s->began = saved->began;
    group_adopt(&s->group, saved->top, saved->file_slots);
    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        Member *m = (Member *)s->group.member[i];

        if (m && !g_ptr_array_find(s->leaving, m, NULL)) {
            work_watch(s, m);
        }
    }
    for (unsigned i = 0; i < clients->len; i++) {
        client_resume(s, &g_array_index(clients, GotClient, i));
    }
    server_start(s);
    set_all_inherit(s, CLOSE_ON_EXEC);
}

static int resume(Server *s, Image *im, const SavedServer *saved)
{
    g_autoptr(GArray) clients = g_array_new(FALSE, FALSE, sizeof(GotClient));
    int ret = get_group(im, saved, &s->group);

    g_array_set_clear_func(clients, got_client_clear);
    for (uint32_t i = 0; i < saved->members && ret == 0; i++) {
        ret = get_member(im, s, saved->top);
    }
    for (uint32_t i = 0; i < saved->clients && ret == 0; i++) {
        get_client(im, clients);
        ret = im->error;
    }
    if (ret == 0) {
        ret = image_end(im);
    }
    if (ret == 0) {
        ret = clients_check(s, clients);
    }
    if (ret == 0) {
        ret = group_check(&s->group, saved->top);
    }
    if (ret == 0) {
        go_on(s, saved, clients);
    }
    return ret;
}

int reload_resume(Server *s, const GroupConfig *config)
{
    int fd = atoi(g_getenv(VARIABLE)), ret;
    GroupConfig was = *config;
    SavedServer saved;
    PoolFile file;
    Image im;

    g_unsetenv(VARIABLE);
    ret = image_open(&im, fd);
    if (ret == 0) {
        image_get(&im, &saved, sizeof(saved));
        ret = im.error;
    }
    if (ret < 0) {
        return ret;
    }
    was.key = saved.key;
    was.slots = saved.slots;
    was.max_holds = saved.max_holds;
    file = (PoolFile) { saved.kind, saved.fd, saved.map_fd, saved.keeps_all };
    ret = server_prepare(s, &was, &file, saved.listener);
    if (ret == 0) {
        ret = resume(s, &im, &saved);
    }
    prim.close(fd);
    return ret;
}
