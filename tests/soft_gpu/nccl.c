/* NCCL for soft GPUs: the ranks of one machine meet in shared memory, and compute in the order of
   ranks. A call returns when its work is done (NCCL's returns at once); where a rank doesn't come it
   hangs, as NCCL's would, for SOFT_GPU_NCCL_TIMEOUT seconds (300) or until ncclCommAbort. Two ranks
   on one card, and calls that differ between ranks, are refused. */
#define _GNU_SOURCE
#include "staged.h"
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { SLOT = 1 << 20, MAX_RANKS = MAX_CARDS, MAX_SCALES = 64, NCCL_VERSION = 22703 };
enum { OK, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR };
typedef enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND,
               RECV, DONE } Kind;
enum { SUM, PROD, MAX, MIN, AVG, FIRST_SCALE }; /* further operators multiply, and then sum */
typedef enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT16, FP8_E4M3,
               FP8_E5M2 } Type;

typedef struct { char name[128]; } UniqueId;
typedef struct { Kind kind; Type type; int op, root; size_t count; } Call; /* alike on all ranks */
typedef struct { _Atomic size_t written, read; char bytes[SLOT]; } Pipe;
typedef struct {
  atomic_int num_arrived, round, is_aborted;
  int cards[MAX_RANKS];
  Call calls[MAX_RANKS];
} Shared;
typedef struct Communicator {
  Shared *shared;
  char *slots;  /* one for each rank */
  Pipe *pipes;  /* from each rank to each */
  size_t bytes; /* of all three */
  int num_ranks, rank, num_scales;
  double scales[MAX_SCALES];
  struct Communicator **team; /* of all ranks, where they are in this process */
} Communicator;
typedef struct { Communicator *comm; Call call; const char *from; char *to; int peer; } Work;

int soft_gpu_card(void);

static char problem[300];
#define FAIL(code, ...) return snprintf(problem, sizeof problem, __VA_ARGS__), code

/* ---- waiting for other ranks ---- */

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static int wait_a_little(Communicator *comm, int *tries, double *since) {
  if (comm->shared->is_aborted) FAIL(REMOTE_ERROR, "the communicator was aborted");
  if (!(*tries)++) *since = now();
  if (*tries < 200) sched_yield();
  else usleep(*tries < 2000 ? 50 : 1000);
  if (*tries % 1000 || now() - *since < staged_number("SOFT_GPU_NCCL_TIMEOUT", 300)) return OK;
  comm->shared->is_aborted = 1;
  FAIL(SYSTEM_ERROR, "rank %d of %d waited in vain", comm->rank, comm->num_ranks);
}

static int meet(Communicator *comm) { /* return when all ranks have called this */
  Shared *shared = comm->shared;
  const int round = shared->round;
  int tries = 0, error = OK;
  double since;
  if (atomic_fetch_add(&shared->num_arrived, 1) + 1 == comm->num_ranks) {
    shared->num_arrived = 0;
    shared->round++;
  } else
    while (shared->round == round && !error) error = wait_a_little(comm, &tries, &since);
  return error;
}

/* ---- arithmetic ---- */

static size_t width_of(Type type) {
  static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return widths[type];
}
static float from_bfloat16(uint16_t value) {
  const uint32_t bits = (uint32_t)value << 16;
  float number;
  return *(float *)memcpy(&number, &bits, 4);
}
static uint16_t to_bfloat16(float number) { /* to the nearest, ties to even */
  uint32_t bits;
  memcpy(&bits, &number, 4);
  return number != number ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#define SAME
#define JOINED(a, b)                                                                               \
  (op == PROD  ? (a) * (b)                                                                         \
   : op == MAX ? ((a) > (b) || (a) != (a) ? (a) : (b))                                             \
   : op == MIN ? ((a) < (b) || (a) != (a) ? (a) : (b))                                             \
               : (a) + (b))
#define EACH(Stored, Number, READ, WRITE)                                                          \
  for (size_t i = 0; i < count; i++) {                                                             \
    Number value = READ(((const Stored *)from)[i]), sum = READ(((Stored *)to)[i]);                 \
    if (scale != 1) value = READ(WRITE((Number)(value * scale)));                                  \
    ((Stored *)to)[i] = WRITE(is_first ? value : (Number)JOINED(sum, value));                      \
  }                                                                                                \
  return OK;
static int join(char *to, const char *from, size_t count, Type type, int op, double scale,
                bool is_first) {
  switch (type) {
    case INT8: EACH(int8_t, int8_t, SAME, SAME)
    case UINT8: EACH(uint8_t, uint8_t, SAME, SAME)
    case INT32: EACH(int32_t, int32_t, SAME, SAME)
    case UINT32: EACH(uint32_t, uint32_t, SAME, SAME)
    case INT64: EACH(int64_t, int64_t, SAME, SAME)
    case UINT64: EACH(uint64_t, uint64_t, SAME, SAME)
    case HALF: EACH(_Float16, float, (float), (_Float16))
    case FLOAT: EACH(float, float, SAME, SAME)
    case DOUBLE: EACH(double, double, SAME, SAME)
    case BFLOAT16: EACH(uint16_t, float, from_bfloat16, to_bfloat16)
    default: FAIL(INVALID_ARGUMENT, "soft GPU: no arithmetic for type %d", type);
  }
}

/* Compute `count` elements of this rank's result. Each rank's input is seen at `from`; where it has
   a part for each rank, these are `stride` bytes apart, as are the parts of a gathered result. */
static int compute(const Communicator *comm, Call call, char *to, const char *const *from,
                   size_t count, size_t from_stride, size_t to_stride) {
  const size_t bytes = count * width_of(call.type), own = comm->rank * from_stride;
  const bool is_float = call.type >= HALF;
  const double scale = call.op >= FIRST_SCALE      ? comm->scales[call.op - FIRST_SCALE]
                       : call.op == AVG && is_float ? 1.0 / comm->num_ranks : 1;
  int error = OK;
  if ((call.kind == REDUCE || call.kind == GATHER) && comm->rank != call.root) return OK;
  if (call.kind == BROADCAST) memmove(to, from[call.root], bytes);
  for (int rank = 0; rank < comm->num_ranks && !error && call.kind != BROADCAST; rank++)
    if (call.kind == ALL_GATHER || call.kind == GATHER)
      memmove(to + rank * to_stride, from[rank], bytes);
    else if (call.kind == ALL_TO_ALL) memmove(to + rank * to_stride, from[rank] + own, bytes);
    else
      error = join(to, from[rank] + (call.kind == REDUCE_SCATTER ? own : 0), count, call.type,
                   call.op, scale, rank == 0);
  if (call.op == AVG && !is_float && call.kind != BROADCAST)
    for (size_t i = 0; i < count; i++)
      if (call.type == INT64) ((int64_t *)to)[i] /= comm->num_ranks;
      else if (call.type == INT32) ((int32_t *)to)[i] /= comm->num_ranks;
  return error;
}

/* ---- collectives ---- */

static bool has_parts(Kind kind) { return kind == REDUCE_SCATTER || kind == ALL_TO_ALL; }

static int refuse_unlike(const Communicator *comm, Call mine) {
  for (int rank = 0; rank < comm->num_ranks; rank++) {
    const Call other = comm->shared->calls[rank];
    if (memcmp(&other, &mine, sizeof mine) == 0) continue;
    snprintf(problem, sizeof problem, "soft GPU: ranks make unlike calls: kind %d type %d op %d "
             "root %d count %zu on rank %d, kind %d type %d op %d root %d count %zu on rank %d",
             mine.kind, mine.type, mine.op, mine.root, mine.count, comm->rank,
             other.kind, other.type, other.op, other.root, other.count, rank);
    fprintf(stderr, "%s\n", problem);
    return INVALID_USAGE;
  }
  return OK;
}

/* Go through the slots of shared memory, piece by piece, each between two meetings. */
static int run_with_processes(Work *work) {
  Communicator *comm = work->comm;
  const Call call = work->call;
  const size_t width = width_of(call.type), whole = call.count * width;
  const size_t most = SLOT / (has_parts(call.kind) ? comm->num_ranks : 1) / 16 * 16;
  const char *from[MAX_RANKS];
  for (int rank = 0; rank < comm->num_ranks; rank++) from[rank] = comm->slots + rank * SLOT;
  for (size_t at = 0; at < whole || at == 0; at += most) {
    const size_t bytes = whole - at < most ? whole - at : most;
    char *slot = comm->slots + comm->rank * SLOT;
    comm->shared->calls[comm->rank] = call;
    for (int part = 0; part < (has_parts(call.kind) ? comm->num_ranks : 1); part++)
      if (call.kind != BROADCAST || comm->rank == call.root)
        memcpy(slot + part * most, work->from + part * whole + at, bytes);
    int error = meet(comm);
    if (!error && at == 0) error = refuse_unlike(comm, call);
    if (!error) error = compute(comm, call, work->to + at, from, bytes / width, most, whole);
    if (!error) error = meet(comm);
    if (error) return error;
  }
  return OK;
}

/* All ranks of a team are in this process, as nn.DataParallel has them; so are their calls. */
static int run_with_team(Work *work, int num_left) {
  const Communicator *first = work->comm;
  const size_t whole = work->call.count * width_of(work->call.type);
  Work *of_rank[MAX_RANKS] = {0};
  char *copies[MAX_RANKS] = {0};
  int error = OK;
  for (Work *each = work; each < work + num_left; each++)
    if (each->comm->team == first->team && !of_rank[each->comm->rank] && each->call.kind != DONE)
      of_rank[each->comm->rank] = each;
  for (int rank = 0; rank < first->num_ranks; rank++)
    if (!of_rank[rank] || memcmp(&of_rank[rank]->call, &work->call, sizeof work->call))
      FAIL(INVALID_USAGE, "soft GPU: unlike calls in a group of one process");
  const Call call = work->call;
  const size_t bytes = whole * (has_parts(call.kind) ? first->num_ranks : 1);
  for (int rank = 0; rank < first->num_ranks; rank++)
    copies[rank] = memcpy(malloc(bytes + 1), of_rank[rank]->from, bytes);
  for (int rank = 0; rank < first->num_ranks; rank++) {
    Work *each = of_rank[rank];
    if (!error)
      error = compute(each->comm, call, each->to, (const char *const *)copies, call.count, whole,
                      whole);
    each->call.kind = DONE;
  }
  for (int rank = 0; rank < first->num_ranks; rank++) free(copies[rank]);
  return error;
}

/* ---- sends and receives: those of a group go on together ---- */

static size_t move_some(Work *work, size_t done) { /* return the bytes that went through the pipe */
  const Communicator *comm = work->comm;
  const bool is_send = work->call.kind == SEND;
  Pipe *pipe = comm->pipes + (is_send ? comm->rank * comm->num_ranks + work->peer
                                      : work->peer * comm->num_ranks + comm->rank);
  const size_t written = pipe->written, read = pipe->read, at = (is_send ? written : read) % SLOT;
  size_t bytes = work->call.count * width_of(work->call.type) - done;
  const size_t room = is_send ? SLOT - (written - read) : written - read;
  if (bytes > room) bytes = room;
  if (bytes > SLOT - at) bytes = SLOT - at;
  if (is_send) memcpy(pipe->bytes + at, work->from + done, bytes), pipe->written += bytes;
  else memcpy(work->to + done, pipe->bytes + at, bytes), pipe->read += bytes;
  return bytes;
}

static int run_pairs(Work *works, int count) {
  size_t *done = calloc(count + 1, sizeof *done);
  int tries = 0, error = OK;
  double since;
  for (bool is_left = true; is_left && !error;) {
    bool has_moved = is_left = false;
    for (int i = 0; i < count; i++) {
      const Work *mine = &works[i];
      bool is_next = done[i] < mine->call.count * width_of(mine->call.type);
      is_left |= is_next;
      for (int j = 0; j < i; j++) /* those between the same two come in order */
        if (works[j].comm == mine->comm && works[j].peer == mine->peer &&
            works[j].call.kind == mine->call.kind)
          is_next &= done[j] == works[j].call.count * width_of(works[j].call.type);
      const size_t bytes = is_next ? move_some(&works[i], done[i]) : 0;
      done[i] += bytes;
      has_moved |= bytes > 0;
    }
    if (has_moved) tries = 0;
    else if (is_left) error = wait_a_little(works[0].comm, &tries, &since);
  }
  free(done);
  return error;
}

/* ---- NCCL's calls: they wait for the end of their group ---- */

static __thread int group_depth, num_queued;
static __thread Work *queue;

static int run_queue(void) {
  Work *works = queue, *pairs = malloc((num_queued + 1) * sizeof *pairs);
  const int count = num_queued;
  int num_pairs = 0, error = OK;
  queue = NULL, num_queued = 0;
  for (int i = 0; i < count && !error; i++)
    if (works[i].call.kind == SEND || works[i].call.kind == RECV) pairs[num_pairs++] = works[i];
    else if (works[i].call.kind == DONE) continue;
    else if (works[i].comm->team) error = run_with_team(works + i, count - i);
    else error = run_with_processes(works + i);
  if (!error) error = run_pairs(pairs, num_pairs);
  free(works);
  free(pairs);
  return error;
}

static int add(Communicator *comm, Kind kind, const void *from, void *to, size_t count, Type type,
               int op, int root, int peer) {
  queue = realloc(queue, (num_queued + 1) * sizeof *queue);
  memset(queue + num_queued, 0, sizeof *queue); /* calls are compared with their padding */
  Work *work = queue + num_queued++;
  work->comm = comm, work->from = from, work->to = to, work->peer = peer;
  work->call.kind = kind, work->call.type = type, work->call.op = op;
  work->call.root = root, work->call.count = count;
  return group_depth ? OK : run_queue();
}
int ncclGroupStart(void) { group_depth++; return OK; }
int ncclGroupEnd(void) { return --group_depth ? OK : run_queue(); }
#define FROM_TO const void *from, void *to, size_t count, Type type
#define COMM Communicator *comm, void *stream
int ncclAllReduce(FROM_TO, int op, COMM) {
  return add(comm, ALL_REDUCE, from, to, count, type, op, 0, 0);
}
int ncclReduce(FROM_TO, int op, int root, COMM) {
  return add(comm, REDUCE, from, to, count, type, op, root, 0);
}
int ncclReduceScatter(FROM_TO, int op, COMM) {
  return add(comm, REDUCE_SCATTER, from, to, count, type, op, 0, 0);
}
int ncclBroadcast(FROM_TO, int root, COMM) {
  return add(comm, BROADCAST, from, to, count, type, 0, root, 0);
}
int ncclBcast(void *to, size_t count, Type type, int root, COMM) {
  return add(comm, BROADCAST, to, to, count, type, 0, root, 0);
}
int ncclAllGather(FROM_TO, COMM) { return add(comm, ALL_GATHER, from, to, count, type, 0, 0, 0); }
int ncclGather(FROM_TO, int root, COMM) {
  return add(comm, GATHER, from, to, count, type, 0, root, 0);
}
int ncclAlltoAll(FROM_TO, COMM) { return add(comm, ALL_TO_ALL, from, to, count, type, 0, 0, 0); }
int ncclSend(const void *from, size_t count, Type type, int peer, COMM) {
  return add(comm, SEND, from, NULL, count, type, 0, 0, peer);
}
int ncclRecv(void *to, size_t count, Type type, int peer, COMM) {
  return add(comm, RECV, NULL, to, count, type, 0, 0, peer);
}

/* ---- communicators ---- */

int ncclGetUniqueId(UniqueId *id) {
  uint64_t random[2];
  memset(id, 0, sizeof *id);
  if (getrandom(random, sizeof random, 0) < 0) return SYSTEM_ERROR;
  snprintf(id->name, sizeof id->name, "/soft_gpu_nccl-%016lx%016lx", random[0], random[1]);
  return OK;
}
int ncclCommInitRankConfig(Communicator **made, int num_ranks, UniqueId id, int rank, void *config) {
  if (num_ranks > MAX_RANKS) FAIL(INVALID_ARGUMENT, "soft GPU: over %d ranks", MAX_RANKS);
  Communicator *comm = calloc(1, sizeof *comm);
  const size_t head = (sizeof(Shared) + 4095) / 4096 * 4096;
  comm->num_ranks = num_ranks, comm->rank = rank;
  comm->bytes = head + num_ranks * (SLOT + num_ranks * sizeof(Pipe));
  const int file = shm_open(id.name, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, comm->bytes)) FAIL(SYSTEM_ERROR, "soft GPU: no shared memory");
  comm->shared = mmap(NULL, comm->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (comm->shared == MAP_FAILED) FAIL(SYSTEM_ERROR, "soft GPU: no shared memory");
  comm->slots = (char *)comm->shared + head;
  comm->pipes = (Pipe *)(comm->slots + num_ranks * SLOT);
  const int card = comm->shared->cards[rank] = soft_gpu_card();
  const int error = meet(comm);
  shm_unlink(id.name); /* each has it by now, or never */
  if (error) return error;
  for (int other = 0; other < num_ranks; other++)
    if (other != rank && comm->shared->cards[other] == card)
      FAIL(INVALID_USAGE, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000",
           rank, other, card);
  *made = comm;
  return OK;
}
int ncclCommInitRank(Communicator **made, int num_ranks, UniqueId id, int rank) {
  return ncclCommInitRankConfig(made, num_ranks, id, rank, NULL);
}
int ncclCommInitRankScalable(Communicator **made, int num_ranks, int rank, int num_ids,
                             UniqueId *ids, void *config) {
  return ncclCommInitRankConfig(made, num_ranks, ids[0], rank, config);
}
int ncclCommInitAll(Communicator **made, int num_ranks, const int *devices) {
  Communicator **team = calloc(num_ranks, sizeof *team);
  for (int rank = 0; rank < num_ranks; rank++) {
    team[rank] = made[rank] = calloc(1, sizeof **made);
    made[rank]->num_ranks = num_ranks, made[rank]->rank = rank, made[rank]->team = team;
  }
  return OK;
}
int ncclCommSplit(Communicator *comm, int color, int key, Communicator **made, void *config) {
  struct choice { int color, key; UniqueId id; } mine = {color, key, {""}};
  int error = ncclGetUniqueId(&mine.id), num_ranks = 0, rank = 0;
  memcpy(comm->slots + comm->rank * SLOT, &mine, sizeof mine);
  if (!error) error = meet(comm);
  if (error) return error;
  for (int other = 0; other < comm->num_ranks; other++) {
    const struct choice *its = (struct choice *)(comm->slots + other * SLOT);
    if (its->color != color) continue;
    if (num_ranks++ == 0) mine.id = its->id;
    rank += its->key < key || (its->key == key && other < comm->rank);
  }
  error = meet(comm);
  *made = NULL;
  return error || color < 0 ? error : ncclCommInitRankConfig(made, num_ranks, mine.id, rank, config);
}
int ncclCommFinalize(Communicator *comm) { return OK; }
int ncclCommDestroy(Communicator *comm) {
  if (comm->shared) munmap(comm->shared, comm->bytes);
  free(comm);
  return OK;
}
int ncclCommAbort(Communicator *comm) { /* its memory stays, as another thread may be in it */
  if (comm->shared) comm->shared->is_aborted = 1;
  return OK;
}
int ncclCommGetAsyncError(Communicator *comm, int *error) { return *error = OK; }
int ncclCommCount(const Communicator *comm, int *count) { *count = comm->num_ranks; return OK; }
int ncclCommUserRank(const Communicator *comm, int *rank) { *rank = comm->rank; return OK; }
int ncclCommRegister(Communicator *comm, void *memory, size_t bytes, void **handle) {
  *handle = memory;
  return OK;
}
int ncclCommDeregister(Communicator *comm, void *handle) { return OK; }
int ncclRedOpCreatePreMulSum(int *op, void *scalar, Type type, int residence, Communicator *comm) {
  const double scale = type == HALF       ? (double)*(_Float16 *)scalar
                       : type == FLOAT    ? *(float *)scalar
                       : type == DOUBLE   ? *(double *)scalar
                       : type == BFLOAT16 ? from_bfloat16(*(uint16_t *)scalar)
                                          : 0;
  comm->scales[comm->num_scales % MAX_SCALES] = scale;
  *op = FIRST_SCALE + comm->num_scales++ % MAX_SCALES;
  return OK;
}
int ncclRedOpDestroy(int op, Communicator *comm) { return OK; }
int ncclGetVersion(int *version) { *version = NCCL_VERSION; return OK; }
const char *ncclGetLastError(Communicator *comm) { return problem; }
const char *ncclGetErrorString(int error) {
  static const char *const texts[] = {
      "no error", "unhandled cuda error", "unhandled system error", "internal error",
      "invalid argument", "invalid usage", "remote process exited or there was a network error"};
  return error >= 0 && error < 7 ? texts[error] : "unknown result code";
}
