/* NCCL as the binding sees it, for ranks that are threads of one process and tensors in ordinary memory.
 * Collectives are complete when they return.  A stream of BAD_STREAM makes a call fail. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_GROUPS 64
#define MAX_RANKS 8
#define BAD_STREAM ((void *)0xbad)
#define SUCCESS 0
#define SYSTEM_ERROR 2
#define INVALID_ARGUMENT 4

typedef struct { char internal[128]; } UniqueId;
typedef struct { pthread_barrier_t barrier; int used, size; const void *sent[MAX_RANKS]; void *comms[MAX_RANKS]; } Group;
typedef struct { const void *from; size_t bytes; } Parcel;
typedef struct { Group *group; int rank; Parcel sent[MAX_RANKS]; void *into[MAX_RANKS]; size_t wanted[MAX_RANKS]; } Comm;

static Group groups[MAX_GROUPS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int num_aborted;
static char last_error[128];

int ncclGetVersion(int *version) { *version = 22803; return SUCCESS; }
const char *ncclGetErrorString(int result) { return result == INVALID_ARGUMENT ? "invalid argument" : "unhandled system error"; }
const char *ncclGetLastError(Comm *comm) { return last_error; }
int fakeAborted(void) { return num_aborted; }

static int fail(int result, const char *why) {
    snprintf(last_error, sizeof last_error, "%s", why);
    return result;
}

int ncclGetUniqueId(UniqueId *id) {
    static int next;
    pthread_mutex_lock(&lock);
    memset(id, 0x5a, sizeof *id);
    id->internal[127] = next++;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int ncclCommInitRank(Comm **comm, int size, UniqueId id, int rank) {
    for (int i = 0; i < 127; i++)
        if (id.internal[i] != 0x5a) return fail(INVALID_ARGUMENT, "not an id of this library");
    if (rank < 0 || rank >= size || size > MAX_RANKS) return fail(INVALID_ARGUMENT, "rank out of range");
    Group *group = &groups[(int)id.internal[127] % MAX_GROUPS];
    pthread_mutex_lock(&lock);
    if (!group->used) {
        pthread_barrier_init(&group->barrier, NULL, size);
        group->used = 1;
        group->size = size;
    }
    pthread_mutex_unlock(&lock);
    *comm = calloc(1, sizeof **comm);
    (*comm)->group = group;
    (*comm)->rank = rank;
    pthread_barrier_wait(&group->barrier);
    return SUCCESS;
}

int ncclCommAbort(Comm *comm) { __sync_fetch_and_add(&num_aborted, 1); free(comm); return SUCCESS; }

static size_t size_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return sizes[type];
}

static float read_half(uint16_t bits) { _Float16 value; memcpy(&value, &bits, 2); return (float)value; }
static uint16_t write_half(float value) { _Float16 half = (_Float16)value; uint16_t bits; memcpy(&bits, &half, 2); return bits; }
static float read_brain(uint16_t bits) { uint32_t wide = (uint32_t)bits << 16; float value; memcpy(&value, &wide, 4); return value; }
static uint16_t write_brain(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    return (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

static void add(void *sums, const void *addends, size_t count, int type) {
    for (size_t i = 0; i < count; i++) switch (type) {
        case 2: ((int32_t *)sums)[i] += ((const int32_t *)addends)[i]; break;
        case 4: ((int64_t *)sums)[i] += ((const int64_t *)addends)[i]; break;
        case 6: ((uint16_t *)sums)[i] = write_half(read_half(((uint16_t *)sums)[i]) + read_half(((const uint16_t *)addends)[i])); break;
        case 7: ((float *)sums)[i] += ((const float *)addends)[i]; break;
        case 8: ((double *)sums)[i] += ((const double *)addends)[i]; break;
        case 9: ((uint16_t *)sums)[i] = write_brain(read_brain(((uint16_t *)sums)[i]) + read_brain(((const uint16_t *)addends)[i])); break;
        default: abort();
    }
}

/* Everybody reads what the others have sent before anybody may write. */
int ncclAllReduce(const void *sent, void *received, size_t count, int type, int op, Comm *comm, void *stream) {
    if (op != 0) return fail(INVALID_ARGUMENT, "only sums");
    if (stream == BAD_STREAM) return fail(SYSTEM_ERROR, "the network is down");
    Group *group = comm->group;
    size_t bytes = count * size_of(type);
    char *sums = calloc(1, bytes + 1);
    group->sent[comm->rank] = sent;
    pthread_barrier_wait(&group->barrier);
    memcpy(sums, group->sent[0], bytes);
    for (int rank = 1; rank < group->size; rank++) add(sums, group->sent[rank], count, type);
    pthread_barrier_wait(&group->barrier);
    memcpy(received, sums, bytes);
    free(sums);
    return SUCCESS;
}

int ncclAllGather(const void *sent, void *received, size_t count, int type, Comm *comm, void *stream) {
    if (stream == BAD_STREAM) return fail(SYSTEM_ERROR, "the network is down");
    Group *group = comm->group;
    size_t bytes = count * size_of(type);
    group->sent[comm->rank] = sent;
    pthread_barrier_wait(&group->barrier);
    for (int rank = 0; rank < group->size; rank++) memcpy((char *)received + rank * bytes, group->sent[rank], bytes);
    pthread_barrier_wait(&group->barrier);
    return SUCCESS;
}

/* A rank's sends and receives are complete when its group of calls ends; outside one they fail. */
static __thread int grouped;
static __thread Comm *exchanging;

int ncclGroupStart(void) { grouped = 1; exchanging = NULL; return SUCCESS; }

int ncclSend(const void *sent, size_t count, int type, int peer, Comm *comm, void *stream) {
    if (stream == BAD_STREAM) return fail(SYSTEM_ERROR, "the network is down");
    if (!grouped || peer < 0 || peer >= comm->group->size) return fail(INVALID_ARGUMENT, "not in a group, or no such rank");
    comm->sent[peer] = (Parcel){sent, count * size_of(type)};
    exchanging = comm;
    return SUCCESS;
}

int ncclRecv(void *received, size_t count, int type, int peer, Comm *comm, void *stream) {
    if (!grouped || peer < 0 || peer >= comm->group->size) return fail(INVALID_ARGUMENT, "not in a group, or no such rank");
    comm->into[peer] = received;
    comm->wanted[peer] = count * size_of(type);
    return SUCCESS;
}

int ncclGroupEnd(void) {
    Comm *comm = exchanging;
    int result = SUCCESS;
    grouped = 0;
    if (!comm) return SUCCESS;
    Group *group = comm->group;
    group->comms[comm->rank] = comm;
    pthread_barrier_wait(&group->barrier);
    for (int rank = 0; rank < group->size; rank++) {
        Parcel parcel = ((Comm *)group->comms[rank])->sent[comm->rank];
        if (parcel.bytes != comm->wanted[rank]) result = fail(INVALID_ARGUMENT, "ranks disagree on a size");
        else memcpy(comm->into[rank], parcel.from, parcel.bytes);
    }
    pthread_barrier_wait(&group->barrier);
    return result;
}
