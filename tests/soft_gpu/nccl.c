/* NCCL for soft GPUs: the ranks of one machine meet in shared memory, and sum in the order of
   ranks. A call returns when its work is done (NCCL's returns at once). Without one of the ranks
   it hangs as NCCL's does, for SOFT_GPU_NCCL_TIMEOUT seconds (300) or until ncclCommAbort. Two
   ranks on one card are refused, and so are calls that differ between ranks. */
#define _GNU_SOURCE
#include "staged.h"
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { HEAD = 4096, SLOT = 1 << 20, MAX_RANKS = MAX_CARDS, MAX_SCALES = 64, NCCL_VERSION = 22703 };
enum { OK = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum { HALF = 6, FLOAT, DOUBLE, BFLOAT16 }; /* types; those below HALF are integers */
enum { AVG = 4, FIRST_SCALE }; /* operators, from which on they sum what is multiplied by a scale */
typedef enum {
  ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECV, DONE
} Kind;

typedef struct { char name[128]; } UniqueId;
typedef struct { int kind, type, op, root; size_t count; } Call; /* root: or the other of two */
typedef struct { _Atomic size_t written, read; char bytes[SLOT]; } Pipe;
typedef struct {
  atomic_int num_arrived, round, is_aborted, cards[MAX_RANKS];
  Call calls[MAX_RANKS];
} Shared;
typedef struct {
  int num_ranks, rank;
  Shared *shared; /* by all ranks: processes or, as nn.DataParallel has them, parts of one; and */
  char *slots;    /* one of each rank, and */
  Pipe *pipes;    /* from each rank to each; they stay to the end, as a thread may use them */
  double scales[MAX_SCALES];
  int num_scales;
} Communicator;
typedef struct { Communicator *comm; Call call; const char *from; char *to; } Work;

int soft_gpu_card(void); /* of this thread; by its number in NVML */
extern void (*soft_gpu_reduce)(void *to, void *from, int64_t count, int type, int op, double scale,
                               bool is_first); /* in operators.cpp */

static char problem[300];
#define FAIL(code, ...) return snprintf(problem, sizeof problem, "soft GPU: " __VA_ARGS__), code

/* ---- waiting for other ranks ---- */
static int wait_a_little(Communicator *comm, int *tries) {
  static __thread time_t since;
  if (comm->shared->is_aborted) FAIL(REMOTE_ERROR, "the communicator was aborted");
  if (!(*tries)++) since = time(NULL);
  if (*tries < 200) sched_yield();
  else usleep(*tries < 2000 ? 50 : 1000);
  if (time(NULL) - since <= staged("SOFT_GPU_NCCL_TIMEOUT", 300)) return OK;
  comm->shared->is_aborted = 1;
  FAIL(SYSTEM_ERROR, "rank %d of %d waited in vain", comm->rank, comm->num_ranks);
}
static int meet(Communicator *comm, int count) { /* return when all ranks have come, so many here */
  Shared *shared = comm->shared;
  const int round = shared->round;
  int tries = 0, error = OK;
  if ((shared->num_arrived += count) == comm->num_ranks) {
    shared->num_arrived = 0;
    shared->round++;
  }
  while (shared->round == round && !error) error = wait_a_little(comm, &tries);
  return error;
}

/* ---- collectives ---- */
static size_t width_of(int type) { return (size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}[type]; }
static bool has_parts(int kind) { return kind == REDUCE_SCATTER || kind == ALL_TO_ALL; }

/* Compute a piece of this rank's result, of what each rank has at `from`. Where that has a part for
   each rank they are `from_stride` bytes apart, and those of a gathered result `to_stride`. */
static int compute(const Communicator *comm, Call call, char *to, char *const *from, size_t count,
                   size_t from_stride, size_t to_stride) {
  const size_t bytes = count * width_of(call.type);
  const size_t own = has_parts(call.kind) ? comm->rank * from_stride : 0;
  const double scale = call.op >= FIRST_SCALE ? comm->scales[call.op - FIRST_SCALE]
                       : call.op == AVG ? 1.0 / comm->num_ranks : 1;
  if ((call.kind == REDUCE || call.kind == GATHER) && comm->rank != call.root) return OK;
  if (call.op == AVG && call.type < HALF) FAIL(INVALID_ARGUMENT, "no average of integers");
  if (call.kind == BROADCAST) memmove(to, from[call.root], bytes);
  for (int rank = 0; rank < comm->num_ranks && call.kind != BROADCAST; rank++)
    if (call.kind == ALL_GATHER || call.kind == GATHER || call.kind == ALL_TO_ALL)
      memmove(to + rank * to_stride, from[rank] + own, bytes);
    else soft_gpu_reduce(to, from[rank] + own, count, call.type, call.op, scale, rank == 0);
  return OK;
}
static int refuse_unlike(const Communicator *comm, Call call) {
  for (int rank = 0; rank < comm->num_ranks; rank++) {
    const Call other = comm->shared->calls[rank];
    if (memcmp(&other, &call, sizeof call))
      FAIL(INVALID_USAGE, "unlike calls (kind, type, operator, root, count): %d %d %d %d %zu on "
           "rank %d, %d %d %d %d %zu on rank %d", call.kind, call.type, call.op, call.root,
           call.count, comm->rank, other.kind, other.type, other.op, other.root, other.count, rank);
  }
  return OK;
}

/* Go through the slots piece by piece, each between two meetings. The calls of all ranks that are
   in this process, of each its first in `works` that is not done, go together. */
static int run_collective(Work *works, const Work *end) {
  Communicator *comm = works->comm;
  const Call call = works->call;
  const int num_parts = has_parts(call.kind) ? comm->num_ranks : 1;
  const size_t width = width_of(call.type), whole = call.count * width;
  const size_t most = SLOT / num_parts / 16 * 16; /* bytes of a part that go at once */
  Work *here[MAX_RANKS] = {NULL}, *work;
  char *from[MAX_RANKS];
  int count = 0, error = OK;
  for (work = works; work < end; work++)
    if (work->comm->shared == comm->shared && work->call.kind < SEND && !here[work->comm->rank])
      here[work->comm->rank] = work, count++;
  for (int rank = 0; rank < comm->num_ranks; rank++) from[rank] = comm->slots + rank * SLOT;
  for (size_t at = 0; (at < whole || at == 0) && !error; at += most) {
    const size_t bytes = whole - at < most ? whole - at : most;
    for (int rank = 0; rank < comm->num_ranks; rank++) {
      if (!(work = here[rank])) continue;
      comm->shared->calls[rank] = work->call;
      for (int part = 0; part < num_parts && (call.kind != BROADCAST || rank == call.root); part++)
        memcpy(from[rank] + part * most, work->from + part * whole + at, bytes);
    }
    error = meet(comm, count);
    if (!error && at == 0) error = refuse_unlike(comm, call);
    for (int rank = 0; rank < comm->num_ranks && !error; rank++)
      if ((work = here[rank]))
        error = compute(work->comm, call, work->to + at, from, bytes / width, most, whole);
    if (!error) error = meet(comm, count);
  }
  for (int rank = 0; rank < comm->num_ranks; rank++) if (here[rank]) here[rank]->call.kind = DONE;
  return error;
}

/* ---- sends and receives: those of a group go on together ---- */
static size_t bytes_of(const Work *work) { return work->call.count * width_of(work->call.type); }
static size_t move(const Work *work, size_t done) { /* what its pipe takes, or has: so many bytes */
  const Communicator *comm = work->comm;
  const bool is_send = work->call.kind == SEND;
  const int other = work->call.root, n = comm->num_ranks;
  Pipe *pipe = comm->pipes + (is_send ? comm->rank * n + other : other * n + comm->rank);
  const size_t filled = pipe->written - pipe->read, room = is_send ? SLOT - filled : filled;
  const size_t at = (is_send ? pipe->written : pipe->read) % SLOT;
  size_t bytes = bytes_of(work) - done;
  if (bytes > room) bytes = room;
  if (bytes > SLOT - at) bytes = SLOT - at;
  if (is_send) memcpy(pipe->bytes + at, work->from + done, bytes), pipe->written += bytes;
  else memcpy(work->to + done, pipe->bytes + at, bytes), pipe->read += bytes;
  return bytes;
}
static int run_pairs(const Work *works, int count) {
  size_t *done = calloc(count + 1, sizeof *done);
  int tries = 0, error = OK;
  for (int num_left = count; num_left && !error;) {
    bool has_moved = false;
    num_left = 0;
    for (int i = 0; i < count; i++) {
      bool is_next = done[i] < bytes_of(&works[i]);
      num_left += is_next;
      for (int j = 0; j < i; j++) /* those from the same to the same come in order */
        if (works[j].comm == works[i].comm && works[j].call.root == works[i].call.root &&
            works[j].call.kind == works[i].call.kind && done[j] < bytes_of(&works[j]))
          is_next = false;
      const size_t bytes = is_next ? move(&works[i], done[i]) : 0;
      done[i] += bytes;
      has_moved |= bytes > 0;
    }
    if (has_moved) tries = 0;
    else if (num_left) error = wait_a_little(works[0].comm, &tries);
  }
  free(done);
  return error;
}

/* ---- NCCL's calls: they wait for the end of their group ---- */
static __thread int group_depth, num_queued;
static __thread Work *queue;
static int run_queue(void) {
  Work *works = queue, *end = queue + num_queued, *pairs = malloc((num_queued + 1) * sizeof *pairs);
  int num_pairs = 0, error = OK;
  queue = NULL, num_queued = 0;
  for (Work *work = works; work < end && !error; work++)
    if (work->call.kind == SEND || work->call.kind == RECV) pairs[num_pairs++] = *work;
    else if (work->call.kind != DONE) error = run_collective(work, end);
  if (!error) error = run_pairs(pairs, num_pairs);
  free(works);
  free(pairs);
  return error;
}
static int add(Communicator *comm, Kind kind, const void *from, void *to, size_t count, int type,
               int op, int root) {
  queue = realloc(queue, (num_queued + 1) * sizeof *queue);
  Call call = {kind, type, op, root, count};
  queue[num_queued++] = (Work){comm, call, from, to};
  return group_depth ? OK : run_queue();
}
int ncclGroupStart(void) { group_depth++; return OK; }
int ncclGroupEnd(void) { return --group_depth ? OK : run_queue(); }

#define COLLECTIVE(kind, op, root) { return add(comm, kind, from, to, count, type, op, root); }
#define TENSORS const void *from, void *to, size_t count, int type
#define WHERE Communicator *comm, void *stream
int ncclAllReduce(TENSORS, int op, WHERE) COLLECTIVE(ALL_REDUCE, op, 0)
int ncclReduce(TENSORS, int op, int root, WHERE) COLLECTIVE(REDUCE, op, root)
int ncclReduceScatter(TENSORS, int op, WHERE) COLLECTIVE(REDUCE_SCATTER, op, 0)
int ncclBroadcast(TENSORS, int root, WHERE) COLLECTIVE(BROADCAST, 0, root)
int ncclAllGather(TENSORS, WHERE) COLLECTIVE(ALL_GATHER, 0, 0)
int ncclGather(TENSORS, int root, WHERE) COLLECTIVE(GATHER, 0, root)
int ncclAlltoAll(TENSORS, WHERE) COLLECTIVE(ALL_TO_ALL, 0, 0)
int ncclBcast(void *to, size_t count, int type, int root, WHERE) {
  return ncclBroadcast(to, to, count, type, root, comm, stream);
}
int ncclSend(const void *from, size_t count, int type, int peer, WHERE) {
  return add(comm, SEND, from, NULL, count, type, 0, peer);
}
int ncclRecv(void *to, size_t count, int type, int peer, WHERE) {
  return add(comm, RECV, NULL, to, count, type, 0, peer);
}

/* ---- communicators ---- */
int ncclGetUniqueId(UniqueId *id) {
  uint64_t random[2];
  if (getrandom(random, sizeof random, 0) != sizeof random) return SYSTEM_ERROR;
  snprintf(id->name, sizeof id->name, "/soft_gpu_nccl-%016lx%016lx", random[0], random[1]);
  return OK;
}
static Shared *map(int file, int num_ranks) {
  const size_t bytes = HEAD + num_ranks * (SLOT + num_ranks * sizeof(Pipe));
  if (num_ranks > MAX_RANKS || file < 0 || ftruncate(file, bytes)) abort();
  Shared *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return shared;
}
static Communicator *create(Shared *shared, int num_ranks, int rank) {
  char *slots = (char *)shared + HEAD;
  Communicator *comm = malloc(sizeof *comm);
  *comm = (Communicator){num_ranks, rank, shared, slots, (Pipe *)(slots + num_ranks * SLOT)};
  return comm;
}
int ncclCommInitRankConfig(Communicator **made, int num_ranks, UniqueId id, int rank, void *how) {
  const int file = shm_open(id.name, O_RDWR | O_CREAT, 0600);
  Communicator *comm = *made = create(map(file, num_ranks), num_ranks, rank);
  comm->shared->cards[rank] = soft_gpu_card();
  const int error = meet(comm, 1);
  shm_unlink(id.name); /* the others have it open, or will never come */
  for (int other = 0; other < num_ranks && !error; other++)
    if (other != rank && comm->shared->cards[other] == comm->shared->cards[rank])
      FAIL(INVALID_USAGE, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000",
           rank, other, comm->shared->cards[rank]);
  return error;
}
SAME_AS(ncclCommInitRankConfig, ncclCommInitRank)
int ncclCommInitAll(Communicator **made, int num_ranks, const int *devices) {
  Shared *shared = map(memfd_create("soft_gpu_nccl", 0), num_ranks);
  for (int rank = 0; rank < num_ranks; rank++) made[rank] = create(shared, num_ranks, rank);
  return OK;
}
int ncclCommSplit(Communicator *comm, int color, int key, Communicator **made, void *how) {
  struct choice { int color, key; UniqueId id; } mine = {color, key, {""}};
  int error = ncclGetUniqueId(&mine.id), num_ranks = 0, rank = 0;
  memcpy(comm->slots + comm->rank * SLOT, &mine, sizeof mine);
  if (!error) error = meet(comm, 1);
  for (int other = 0; other < comm->num_ranks && !error; other++) {
    const struct choice *its = (struct choice *)(comm->slots + other * SLOT);
    if (its->color != color) continue;
    if (num_ranks++ == 0) mine.id = its->id;
    rank += its->key < key || (its->key == key && other < comm->rank);
  }
  if (!error) error = meet(comm, 1);
  *made = NULL;
  return error || color < 0 ? error : ncclCommInitRankConfig(made, num_ranks, mine.id, rank, how);
}
int ncclCommAbort(Communicator *comm) { comm->shared->is_aborted = 1; return OK; }
int ncclCommCount(const Communicator *comm, int *count) { *count = comm->num_ranks; return OK; }
int ncclCommUserRank(const Communicator *comm, int *rank) { *rank = comm->rank; return OK; }
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int where, Communicator *comm) {
  const int number = comm->num_scales++ % MAX_SCALES;
  float as_float = 0;
  if (type == BFLOAT16) memcpy((char *)&as_float + 2, scalar, 2); /* the upper half of a float */
  comm->scales[number] = type == HALF ? (double)*(_Float16 *)scalar : type == DOUBLE
                         ? *(double *)scalar : type == FLOAT ? *(float *)scalar : as_float;
  *op = FIRST_SCALE + number;
  return OK;
}
int ncclGetVersion(int *version) { *version = NCCL_VERSION; return OK; }
const char *ncclGetLastError(Communicator *comm) { return problem; }
const char *ncclGetErrorString(int error) {
  return (const char *[]){"no error", "unhandled cuda error", "unhandled system error",
                          "internal error", "invalid argument", "invalid usage",
                          "remote process exited or there was a network error"}[error];
}
