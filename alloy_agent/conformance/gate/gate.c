/* The launch gate, and the emulated driver library that it is tried on.
 *
 * Two libraries are built of this file. The interposer (default) stands in front of a driver
 * library's launch entry points: production is counted, an opportunistic tenant is let through only
 * under a valid lease and while production has nothing outstanding. With -DALLOY_EMULATED it is the
 * driver library of the emulated accelerator, with the same entry points.
 *
 * Rules that stay true in here:
 *   - The order page is written by the agent alone, the state page by the tenant alone. Slots of
 *     the state page never move; a process takes a fresh one and zeroes it.
 *   - An opportunistic launch without a valid lease waits. A production launch never waits.
 *   - No lock is shared between processes. Sleeps end by themselves; signals only shorten them.
 *   - Every public entry begins with the 5-byte NOP that makes a kernel uprobe cheap.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

typedef uintptr_t A;
/* as many arguments as the longest entry has (hipExtModuleLaunchKernel); what a shorter one is given
   beyond its own comes from the caller's frame and goes unread */
#define PARAMS A a0, A a1, A a2, A a3, A a4, A a5, A a6, A a7, A a8, A a9, A a10, A a11, A a12, A a13
#define ARGS a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13
typedef long (*launch_fn)(PARAMS);
#define PUBLIC __attribute__((visibility("default")))

/* name, vendor, argument that names the kernel, where the stream stands, whether 0 means the thread's
   own stream. Sources: cuda.h 13.0, hip_runtime_api.h 7.0; a `dim3` by value takes two arguments. */
enum { EMU, CUDA, HIP, HSA, VENDORS };
enum { NULL_STREAM = -1, IN_CONFIG = -2, MANY = -3 };
#define LAUNCHES(X) \
  X(cuLaunch, CUDA, 0, NULL_STREAM, 0) X(cuLaunchGrid, CUDA, 0, NULL_STREAM, 0) \
  X(cuLaunchGridAsync, CUDA, 0, 3, 0) \
  X(cuLaunchKernel, CUDA, 0, 8, 0) X(cuLaunchKernel_ptsz, CUDA, 0, 8, 1) \
  X(cuLaunchKernelEx, CUDA, 1, IN_CONFIG, 0) X(cuLaunchKernelEx_ptsz, CUDA, 1, IN_CONFIG, 1) \
  X(cuLaunchCooperativeKernel, CUDA, 0, 8, 0) X(cuLaunchCooperativeKernel_ptsz, CUDA, 0, 8, 1) \
  X(cuLaunchCooperativeKernelMultiDevice, CUDA, 0, MANY, 0) \
  X(cuGraphLaunch, CUDA, 0, 1, 0) X(cuGraphLaunch_ptsz, CUDA, 0, 1, 1) \
  X(hipLaunchKernel, HIP, 0, 7, 0) X(hipLaunchKernel_spt, HIP, 0, 7, 1) \
  X(hipExtLaunchKernel, HIP, 0, 7, 0) X(hipModuleLaunchKernel, HIP, 0, 8, 0) \
  X(hipExtModuleLaunchKernel, HIP, 0, 8, 0) X(hipHccModuleLaunchKernel, HIP, 0, 8, 0) \
  X(hipModuleLaunchCooperativeKernel, HIP, 0, 8, 0) \
  X(hipLaunchCooperativeKernel, HIP, 0, 7, 0) X(hipLaunchCooperativeKernel_spt, HIP, 0, 7, 1) \
  X(hipLaunchKernelExC, HIP, 1, IN_CONFIG, 0) X(hipDrvLaunchKernelEx, HIP, 1, IN_CONFIG, 0) \
  X(hipLaunchCooperativeKernelMultiDevice, HIP, 0, MANY, 0) \
  X(hipExtLaunchMultiKernelMultiDevice, HIP, 0, MANY, 0) \
  X(hipModuleLaunchCooperativeKernelMultiDevice, HIP, 0, MANY, 0) \
  X(hipGraphLaunch, HIP, 0, 1, 0) X(hipGraphLaunch_spt, HIP, 0, 1, 1) \
  X(emuLaunchKernel, EMU, 0, NULL_STREAM, 0) X(emuGraphLaunch, EMU, 0, NULL_STREAM, 0)

#if defined(__x86_64__)
#define ENTRY(name) __asm__(".text\n.globl " #name "\n.type " #name ",@function\n" #name ":\n" \
  ".byte 0x0f,0x1f,0x44,0x00,0x00\njmp impl_" #name "\n.size " #name ",.-" #name "\n");
#else
#define ENTRY(name) __asm__(".text\n.globl " #name "\n.type " #name ",%function\n" #name ":\n" \
  "nop\nb impl_" #name "\n.size " #name ",.-" #name "\n");
#endif
#define HIDDEN __attribute__((used, visibility("hidden")))

static inline uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_BOOTTIME, &t);
  return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

#ifdef ALLOY_EMULATED
/* --- the emulated driver library ------------------------------------------------------------ */

struct submit { uint32_t ident, duration_us; };
static int sock = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static _Atomic uint64_t submitted, completed;
static void (*hook)(void *, uint64_t);
static void *hook_for;
static int lost;
static uint8_t family[1 << 16]; /* of each submission, by its number */
static uint64_t own_completed;  /* of those through the emulated library's own entries */

static void *receiver(void *arg) {
  int fd = (int)(intptr_t)arg;
  uint64_t count;
  for (;;) {
    ssize_t got = recv(fd, &count, sizeof count, 0);
    if (got < 0 && errno == EINTR) continue;
    pthread_mutex_lock(&lock);
    if (got != (ssize_t)sizeof count) { lost |= fd == sock; count = atomic_load(&submitted); }
    for (uint64_t n = atomic_load(&completed); n < count; n++)
      own_completed += family[n & 0xffff] == EMU;
    atomic_store(&completed, count);
    if (hook) hook(hook_for, own_completed);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    if (got != (ssize_t)sizeof count) return NULL;
  }
}

static int connect_device(void) {
  if (sock >= 0 || lost) return lost ? -1 : 0;
  const char *path = getenv("ALLOY_EMU_SOCKET");
  struct sockaddr_un to = {.sun_family = AF_UNIX};
  if (!path || strlen(path) >= sizeof to.sun_path) return -1;
  strcpy(to.sun_path, path);
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to)) { if (fd >= 0) close(fd); return -1; }
  sock = fd;
  pthread_t thread;
  return pthread_create(&thread, NULL, receiver, (void *)(intptr_t)fd) ? -1 : 0;
}

static void forget(void) { /* in a forked child: a context of its own */
  sock = -1; lost = 0; submitted = completed = own_completed = 0;
  pthread_mutex_init(&lock, NULL);
}
__attribute__((constructor)) static void start(void) { pthread_atfork(NULL, NULL, forget); }

static long submit(int vendor, uint32_t ident, uint32_t duration_us) {
  struct submit message = {ident, duration_us};
  pthread_mutex_lock(&lock);
  int bad = connect_device();
  if (!bad) {
    family[atomic_fetch_add(&submitted, 1) & 0xffff] = (uint8_t)vendor;
    while (send(sock, &message, sizeof message, MSG_NOSIGNAL) < 0)
      if (errno != EINTR) { atomic_fetch_sub(&submitted, 1); bad = 1; break; }
  }
  pthread_mutex_unlock(&lock);
  return bad ? 999 : 0;
}

/* the kernel's handle is its number; its length in microseconds is the first number of the grid */
#define X(name, vendor, kernel, stream, own) HIDDEN long impl_##name(PARAMS) { \
    (void)a2; (void)a3; (void)a4; (void)a5; (void)a6; (void)a7; (void)a8; (void)a9; (void)a10; \
    (void)a11; (void)a12; (void)a13; \
    if (stream == IN_CONFIG) return a0 ? submit(vendor, (uint32_t)a1, *(uint32_t *)a0) : 1; \
    return submit(vendor, (uint32_t)a0, (uint32_t)a1); } ENTRY(name)
LAUNCHES(X)
#undef X

/* an event is the number of launches that came before it; streams are all one */
static long event_create(A *out) { *out = (A)calloc(1, sizeof(uint64_t)); return *out ? 0 : 2; }
static long event_record(A event) { *(uint64_t *)event = atomic_load(&submitted); return 0; }
static long event_query(A event) {
  return atomic_load(&completed) >= *(uint64_t *)event ? 0 : 600;
}
static long not_capturing(int *out) { *out = 0; return 0; }
PUBLIC long cuEventCreate(A *out, unsigned flags) { (void)flags; return event_create(out); }
PUBLIC long cuEventRecord(A event, A stream) { (void)stream; return event_record(event); }
PUBLIC long cuEventQuery(A event) { return event_query(event); }
PUBLIC long cuStreamIsCapturing(A stream, int *out) { (void)stream; return not_capturing(out); }
PUBLIC long hipEventCreateWithFlags(A *out, unsigned flags) { (void)flags; return event_create(out); }
PUBLIC long hipEventRecord(A event, A stream) { (void)stream; return event_record(event); }
PUBLIC long hipEventQuery(A event) { return event_query(event); }
PUBLIC long hipStreamIsCapturing(A stream, int *out) { (void)stream; return not_capturing(out); }

PUBLIC long emuSynchronize(void) {
  pthread_mutex_lock(&lock);
  while (!lost && atomic_load(&completed) < atomic_load(&submitted))
    pthread_cond_wait(&changed, &lock);
  int bad = lost;
  pthread_mutex_unlock(&lock);
  return bad ? 999 : 0;
}
PUBLIC void emuOnComplete(void (*fn)(void *, uint64_t), void *whom) {
  pthread_mutex_lock(&lock);
  hook = fn;
  hook_for = whom;
  pthread_mutex_unlock(&lock);
}

/* HSA: a queue of packets and its doorbell. The grid's first number is again the length. */
struct hsa_queue { uint32_t type, features; char *base; uint64_t doorbell; uint32_t size, pad; uint64_t id; };
static struct emulated { struct hsa_queue queue; uint64_t read, write, number[256]; } *bells[64];
static int made_queues;
PUBLIC long hsa_queue_create(uint64_t agent, uint32_t size, uint32_t type, void *call, void *data,
                             uint32_t priv, uint32_t group, struct hsa_queue **out) {
  (void)agent; (void)call; (void)data; (void)priv; (void)group;
  struct emulated *e = made_queues < 64 ? calloc(1, sizeof *e) : NULL;
  if (!e || size > 256) return 0x1000;
  e->queue = (struct hsa_queue){type, 0, calloc(size, 64), 0xbe110000u + (uint64_t)made_queues, size, 0, 1};
  bells[made_queues++] = e;
  *out = &e->queue;
  return 0;
}
PUBLIC long hsa_queue_destroy(struct hsa_queue *queue) { queue->size = 0; return 0; }
HIDDEN long impl_bell(uint64_t signal, uint64_t value) {
  struct emulated *e = signal - 0xbe110000u < (uint64_t)made_queues ? bells[signal - 0xbe110000u] : NULL;
  for (; e && e->write <= value; e->write++) {
    char *packet = e->queue.base + e->write % e->queue.size * 64;
    submit(HSA, 1, *(uint32_t *)(packet + 12));
    e->number[e->write % 256] = atomic_load(&submitted);
  }
  return 0;
}
#define BELL(name) HIDDEN void impl_##name(uint64_t s, uint64_t v) { impl_bell(s, v); } ENTRY(name)
BELL(hsa_signal_store_relaxed) BELL(hsa_signal_store_screlease) BELL(hsa_signal_store_release)
PUBLIC uint64_t hsa_queue_load_read_index_relaxed(struct hsa_queue *queue) {
  struct emulated *e = (struct emulated *)queue;
  while (e->read < e->write && atomic_load(&completed) >= e->number[e->read % 256]) e->read++;
  return e->read;
}

static void *own(const char *name) {
  static void *self;
  Dl_info info;
  if (!self && dladdr((void *)own, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  return self ? dlsym(self, name) : NULL;
}
PUBLIC int cuGetProcAddress(const char *name, void **out, int v, uint64_t f) {
  (void)v; (void)f;
  return (*out = own(name)) ? 0 : 500;
}
PUBLIC int cuGetProcAddress_v2(const char *name, void **out, int v, uint64_t f, int *status) {
  if (status) *status = 0;
  return cuGetProcAddress(name, out, v, f);
}
PUBLIC int hipGetProcAddress(const char *name, void **out, int v, uint64_t f, int *status) {
  return cuGetProcAddress_v2(name, out, v, f, status);
}

#else
/* --- the interposer --------------------------------------------------------------------------- */

#define MAGIC 0x315447594f4c4c41ull /* "ALLOYGT1" */
#define VERSION 1u
#define SLOTS 64
#define RING 256
#define IDENTS 256
#define LONGEST_LEASE_NS 1000000000ull /* longer ones come from another clock, or are forged */
#define FLIGHTS 4096u /* more than a driver queues before it makes its caller wait */
/* how completions are known, from nothing to all: the page says the least of those in use */
enum { UNSEEN = 0, NO_COMPLETIONS = 1, STARTED = 2, CALLBACKS = 3, EVENTS = 4, COUNTED = 5 };
enum { PASS = 0, PRODUCTION = 1, OPPORTUNISTIC = 2 };

struct order {
  uint64_t magic; uint32_t version, role;
  _Atomic uint64_t sequence; /* odd while the agent writes */
  uint64_t lease_until_ns, generation;
  double duty, quiet_from_s, quiet_to_s;
  uint64_t hold_from, hold_to, hold_until_ns, outstanding_ns;
  double share_max;
  uint64_t stopped, dead_slots; /* of production */
};
struct burst { uint64_t started, ended, idle_since, kernels, signature, contended; };
struct slot {
  _Atomic uint32_t pid, ready;
  _Atomic uint64_t attached_ns, launched, completed, busy_since, idle_since, bursts, signature,
      kernels, heartbeat, waiting, waited_ns, device_ns;
  _Atomic uint32_t wake, completions;
  _Atomic uint64_t captured; /* calls that were only written down, for a graph */
  _Atomic uint64_t space; /* the pid namespace that `pid` is of, 0: unknown */
  uint64_t pad[16];
  struct burst ring[RING];
};
struct state { uint64_t magic; uint32_t version, slots; char pad[4080]; struct slot slot[SLOTS]; };

static int role = PASS;
static struct order *page;
static const struct state *production;
static struct state *mine;
static struct slot *me;
static struct slot spill; /* where no page can be had: counted for nobody */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t known_ns[IDENTS], longest_ns, last_done_ns;
/* What one driver library offers to learn of completions by; a process may have loaded several. */
static struct meter {
  const void *base; /* where it is loaded */
  int vendor, kind;
  uint64_t counted;
  long (*create)(A *, unsigned), (*record)(A, A), (*query)(A), (*call)(A, void (*)(void *), void *);
  long (*capturing)(A, int *), (*current)(A *), (*exchange)(int *);
} meters[16], bells = {.vendor = HSA}, untold = {.kind = NO_COMPLETIONS};
enum { METERS = sizeof meters / sizeof *meters };
static int hip_used;
/* launches in order; an entry without `tracked` is one whose launch has not returned yet */
static struct flight {
  uint64_t launched_ns, took_ns, mark; /* mark: of an AQL queue, the packet */
  A event, home;              /* home: the context whose event it is */
  uint32_t ident, more;       /* more: launches beyond the ring that end with this one */
  struct meter *meter;
  uint8_t tracked, done;
} flight[FLIGHTS];
static uint64_t head, tail; /* numbers of the oldest and the next launch */
static pthread_mutex_t names = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ends; /* a launch of one's own is done */
static int gate_waits;
static double tokens_s, capped_s;
static uint64_t filled_ns;

static void *map(const char *path, size_t size, int write) {
  if (!path) return NULL;
  int fd = open(path, (write ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return NULL;
  struct stat s;
  void *at = MAP_FAILED;
  if (!fstat(fd, &s) && (size_t)s.st_size >= size)
    at = mmap(NULL, size, PROT_READ | (write ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
  close(fd);
  return at == MAP_FAILED ? NULL : at;
}

static void take_slot(void) {
  me = &spill;
  head = tail = last_done_ns = 0;
  if (!mine) return;
  struct stat s;
  uint64_t space = stat("/proc/self/ns/pid", &s) ? 0 : (uint64_t)s.st_ino;
  /* an owner in another pid namespace cannot be asked for: its slot is taken last, if none is free */
  for (int n = 0; n < 2 * SLOTS; n++) {
    int i = n % SLOTS;
    uint32_t owner = atomic_load(&mine->slot[i].pid);
    int near = atomic_load(&mine->slot[i].space) == space;
    if (owner && !near && n < SLOTS) continue;
    /* what this process was before it became this program */
    int old = near && owner == (uint32_t)getpid();
    if (owner && !old && (!syscall(SYS_kill, owner, 0) || errno != ESRCH)) continue;
    if (!old && !atomic_compare_exchange_strong(&mine->slot[i].pid, &owner, (uint32_t)getpid()))
      continue;
    me = &mine->slot[i];
    atomic_store(&me->ready, 0);
    memset((char *)me + 8, 0, sizeof *me - 8); /* a new process, a new generation */
    atomic_store(&me->space, space);
    atomic_store(&me->attached_ns, now_ns());
    atomic_store(&me->idle_since, now_ns());
    atomic_store(&me->ready, 1);
    return;
  }
}

static void attach(void) {
  const char *what = getenv("ALLOY_GATE_ROLE");
  role = !what ? PASS : !strcmp(what, "production") ? PRODUCTION : OPPORTUNISTIC;
  page = map(getenv("ALLOY_GATE_ORDER"), sizeof *page, 0);
  mine = map(getenv("ALLOY_GATE_STATE"), sizeof *mine, 1);
  production = map(getenv("ALLOY_GATE_PRODUCTION"), sizeof *production, 0);
  take_slot();
}

static void forget_meters(void);
static void begin_waiting(void) {
  pthread_condattr_t clock;
  pthread_mutex_init(&lock, NULL);
  pthread_mutex_init(&names, NULL);
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); /* the wall clock may be set */
  pthread_cond_init(&ends, &clock);
  gate_waits = 0;
}

static void forked(void) {
  begin_waiting();
  forget_meters();
  take_slot();
}

__attribute__((constructor)) static void start(void) {
  begin_waiting();
  attach();
  pthread_atfork(NULL, NULL, forked);
}

/* The gate's decision, written like `rate.admit`: 0 passes, else nanoseconds to wait. */
PUBLIC uint64_t alloy_admit(const struct order *o, int busy, uint64_t idle_since, uint64_t bursts,
                            double tokens, double capped, uint64_t now, uint64_t kernel,
                            uint64_t held) {
  const uint64_t event = UINT64_MAX;
  if (o->stopped || busy) return event;
  if (o->hold_from <= bursts && bursts < o->hold_to && now < o->hold_until_ns)
    return o->hold_until_ns - now;
  if (held && held + kernel > o->outstanding_ns) return event;
  double age = (double)(now - idle_since) * 1e-9;
  double ends = age + (double)(held + kernel) * 1e-9 + 50e-6;
  if (ends > o->quiet_from_s && age < o->quiet_to_s)
    return (uint64_t)((o->quiet_to_s - age) * 1e9) + 1;
  double price = kernel > o->outstanding_ns ? (double)kernel * 1e-9 : 1e-6, wait = 0;
  if (o->duty < 1.0 && tokens < price) wait = (price - tokens) / o->duty;
  if (o->share_max < 1.0 && capped < price) wait = fmax(wait, (price - capped) / o->share_max);
  return (uint64_t)(wait * 1e9);
}

/* A consistent copy of the order; 0 if there is none to trust now. */
static int read_order(struct order *out, uint64_t now) {
  if (!page) return 0;
  for (int tries = 0; tries < 1000; tries++) {
    uint64_t before = atomic_load(&page->sequence);
    memcpy(out, page, sizeof *out);
    atomic_thread_fence(memory_order_acquire);
    if (!(before & 1) && before == atomic_load(&page->sequence))
      return out->magic == MAGIC && out->version == VERSION && out->role == OPPORTUNISTIC &&
             now < out->lease_until_ns && out->lease_until_ns - now < LONGEST_LEASE_NS &&
             out->duty > 0.0 && out->share_max > 0.0 && out->quiet_from_s >= 0.0;
  }
  return 0;
}

static int look(uint64_t dead, uint64_t now, uint64_t *idle_since, uint64_t *bursts,
                const struct slot **who) {
  int busy = 0;
  *idle_since = *bursts = 0;
  *who = NULL;
  if (!production || production->magic != MAGIC) return 0;
  for (int i = 0; i < SLOTS; i++) {
    const struct slot *s = &production->slot[i];
    if (!atomic_load_explicit(&s->pid, memory_order_relaxed)) continue;
    uint64_t since = atomic_load(&s->idle_since);
    *bursts += atomic_load(&s->bursts);
    if (since > *idle_since && since <= now) *idle_since = since;
    if (dead >> i & 1) continue;
    if (atomic_load(&s->launched) != atomic_load(&s->completed)) { busy = 1; *who = s; }
    else if (!*who) *who = s;
  }
  return busy;
}

static void wait_ns(const struct slot *who, uint32_t seen, uint64_t ns) {
  if (ns > 1000000) ns = 1000000; /* look again each millisecond: the agent may have died */
  struct timespec t = {0, (long)ns};
  if (who) syscall(SYS_futex, &who->wake, FUTEX_WAIT, seen, &t, NULL, 0);
  else nanosleep(&t, NULL);
}

static uint64_t estimate(uint32_t ident, uint64_t unknown) {
  uint64_t k = known_ns[ident % IDENTS];
  return k ? k : longest_ns ? longest_ns : unknown;
}

static uint64_t outstanding_ns(uint64_t enough) {
  uint64_t sum = 0;
  for (uint64_t n = head; n < tail && sum <= enough; n++)
    sum += estimate(flight[n % FLIGHTS].ident, 1000000) * (1 + flight[n % FLIGHTS].more);
  return sum;
}

static void await_own(void) { /* with the lock held; for a millisecond at most */
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  t.tv_nsec += 1000000;
  if (t.tv_nsec >= 1000000000) { t.tv_sec++; t.tv_nsec -= 1000000000; }
  gate_waits++;
  pthread_cond_timedwait(&ends, &lock, &t);
  gate_waits--;
}

static void pass_gate(uint32_t ident) {
  uint64_t begin = now_ns();
  atomic_fetch_add(&me->waiting, 1);
  for (;;) {
    struct order o;
    const struct slot *who;
    uint64_t now = now_ns(), since, bursts, delay = 1000000;
    atomic_store_explicit(&me->heartbeat, now, memory_order_relaxed);
    if (me == &spill) take_slot(); /* a process that nobody can see does not pass */
    if (me != &spill && read_order(&o, now)) {
      int busy = look(o.dead_slots, now, &since, &bursts, &who);
      uint32_t seen = who ? atomic_load(&who->wake) : 0;
      uint64_t kernel = estimate(ident, o.outstanding_ns);
      /* an estimate that lets nothing pass is never corrected: try again after a while */
      if (now - begin > 200000000ull && kernel > o.outstanding_ns / 2) kernel = o.outstanding_ns / 2;
      double depth = fmax(2e-9 * (double)o.outstanding_ns, 1e-9 * (double)kernel);
      uint64_t from = filled_ns > since ? filled_ns : since;
      if (!busy && now > from) tokens_s = fmin(depth, tokens_s + (double)(now - from) * 1e-9 * o.duty);
      if (now > filled_ns) capped_s = fmin(depth, capped_s + (double)(now - filled_ns) * 1e-9 * o.share_max);
      filled_ns = now;
      delay = alloy_admit(&o, busy, since, bursts, tokens_s, capped_s, now, kernel,
                          outstanding_ns(o.outstanding_ns));
      if (!delay) {
        tokens_s -= (double)kernel * 1e-9;
        capped_s -= (double)kernel * 1e-9;
        break;
      }
      if (delay == UINT64_MAX && !busy) { await_own(); continue; }
      if (!busy) who = NULL;
      pthread_mutex_unlock(&lock);
      wait_ns(who, seen, delay);
      pthread_mutex_lock(&lock);
      continue;
    }
    pthread_mutex_unlock(&lock);
    wait_ns(NULL, 0, delay);
    pthread_mutex_lock(&lock);
  }
  atomic_fetch_sub(&me->waiting, 1);
  atomic_fetch_add(&me->waited_ns, now_ns() - begin);
}

static void longest_of_all(void) {
  longest_ns = 0;
  for (int i = 0; i < IDENTS; i++) if (known_ns[i] > longest_ns) longest_ns = known_ns[i];
}

/* Count the oldest launches that are done; with the last one a busy period ends. Several that were seen
   to be done at once share the time since the one before them as their estimates do. */
static void settle(uint64_t now) {
  uint64_t sum = 0, weights = 0, end = head;
  for (; end < tail && flight[end % FLIGHTS].done; end++)
    weights += estimate(flight[end % FLIGHTS].ident, 1000000);
  uint64_t from = head < end ? flight[head % FLIGHTS].launched_ns : now;
  if (from < last_done_ns) from = last_done_ns;
  const double unit = weights && now > from ? (double)(now - from) / (double)weights : 0.0;
  for (uint64_t n = head; n < end; n++) {
    struct flight *f = &flight[n % FLIGHTS];
    f->took_ns = (uint64_t)(unit * (double)estimate(f->ident, 1000000));
    sum += 1 + f->more;
    atomic_fetch_add(&me->device_ns, f->took_ns);
  }
  for (; head < end; head++) {
    struct flight *f = &flight[head % FLIGHTS];
    /* what a kernel takes by itself is near its shortest times: others' work only adds to it */
    uint64_t *k = &known_ns[f->ident % IDENTS], before = *k, took = f->took_ns;
    if (f->meter->vendor == HSA) continue;
    *k = !before ? took : took < before ? (before + 3 * took) / 4 : before + (took - before) / 32;
    if (*k > longest_ns) longest_ns = *k;
    else if (before == longest_ns) longest_of_all();
  }
  if (!sum) return;
  last_done_ns = now;
  atomic_fetch_add(&me->completed, sum);
  if (gate_waits) pthread_cond_broadcast(&ends);
  atomic_store_explicit(&me->heartbeat, now, memory_order_relaxed);
  if (head != tail || !atomic_load(&me->kernels)) return;
  uint64_t n = atomic_load(&me->bursts);
  me->ring[n % RING] = (struct burst){atomic_load(&me->busy_since), now, atomic_load(&me->idle_since),
                                      atomic_load(&me->kernels), atomic_load(&me->signature), 0};
  atomic_store(&me->idle_since, now);
  atomic_store(&me->kernels, 0);
  atomic_store(&me->signature, 0);
  atomic_store(&me->bursts, n + 1);
  atomic_fetch_add(&me->wake, 1);
  if (role == PRODUCTION) syscall(SYS_futex, &me->wake, FUTEX_WAKE, 1 << 20, NULL, NULL, 0);
}

/* The emulated library says how many of its own launches are complete. */
static void finished(void *whom, uint64_t count) {
  struct meter *m = whom;
  pthread_mutex_lock(&lock);
  for (uint64_t n = head; n < tail && m->counted < count; n++) {
    struct flight *f = &flight[n % FLIGHTS];
    if (f->meter != m || f->done) continue;
    f->done = 1;
    m->counted += 1 + f->more;
  }
  settle(now_ns());
  pthread_mutex_unlock(&lock);
}

static void *(*real_dlsym)(void *, const char *);
static void *next(const char *name) {
  if (!real_dlsym) { /* the one symbol that dlsym itself cannot be asked for */
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    for (int i = 0; i < 3 && !real_dlsym; i++)
      real_dlsym = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", versions[i]);
  }
  void *at = real_dlsym ? real_dlsym(RTLD_NEXT, name) : NULL;
  static void *driver[4];
  static const char *const files[] = {"libcuda.so.1", "libamdhip64.so", "libhsa-runtime64.so.1",
                                      "liballoyemu.so"};
  for (int i = 0; i < 4 && !at && real_dlsym; i++) {
    if (!driver[i]) driver[i] = dlopen(files[i], RTLD_LAZY | RTLD_NOLOAD);
    if (!driver[i] && i == 3 && getenv("ALLOY_EMU_LIBRARY"))
      driver[i] = dlopen(getenv("ALLOY_EMU_LIBRARY"), RTLD_LAZY | RTLD_NOLOAD);
    if (driver[i]) at = real_dlsym(driver[i], name);
  }
  return at;
}

PUBLIC int cuGetProcAddress(const char *, void **, int, uint64_t);
PUBLIC int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
PUBLIC int hipGetProcAddress(const char *, void **, int, uint64_t, int *);

/* --- completions ---------------------------------------------------------------------------- */

static struct { A event, home; } spare_events[FLIGHTS];
static unsigned spares;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static int poller, poller_waits;
static __thread int inside __attribute__((tls_model("initial-exec")));
enum { RELAXED = 2, NO_TIMING = 2, NOT_READY = 600, CAPTURING = 1 };

static void forget_meters(void) { /* in a forked child: contexts and threads do not survive */
  memset(meters, 0, sizeof meters);
  bells.kind = UNSEEN;
  spares = 0; poller = poller_waits = 0;
  pthread_cond_init(&work, NULL);
}

static void *at_home(void *home, const char *name) { return home ? real_dlsym(home, name) : NULL; }

static void look_up(struct meter *m, const char *file) {
  void *home = file ? dlopen(file, RTLD_LAZY | RTLD_NOLOAD) : NULL;
  if (m->vendor == EMU) {
    void (*on)(void (*)(void *, uint64_t), void *) =
        (void (*)(void (*)(void *, uint64_t), void *))at_home(home, "emuOnComplete");
    m->kind = on ? COUNTED : NO_COMPLETIONS;
    if (on) on(finished, m);
    return;
  }
  const int cu = m->vendor == CUDA;
#define FIND(field, cuda, hip) m->field = (__typeof__(m->field))at_home(home, cu ? cuda : hip)
  FIND(create, "cuEventCreate", "hipEventCreateWithFlags");
  FIND(record, "cuEventRecord", "hipEventRecord");
  FIND(query, "cuEventQuery", "hipEventQuery");
  FIND(call, "cuLaunchHostFunc", "hipLaunchHostFunc");
  FIND(capturing, "cuStreamIsCapturing", "hipStreamIsCapturing");
  FIND(current, "cuCtxGetCurrent", "hipGetDevice");
  FIND(exchange, "cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode");
#undef FIND
  m->kind = m->create && m->record && m->query ? EVENTS : m->call ? CALLBACKS : NO_COMPLETIONS;
}

static void publish(void);
static struct meter *meter_of(int vendor, launch_fn real) { /* with the lock held */
  Dl_info info = {0};
  dladdr((void *)real, &info);
  for (int i = 0; i < METERS; i++) {
    struct meter *m = &meters[i];
    if (m->kind && (m->base != info.dli_fbase || m->vendor != vendor)) continue;
    if (m->kind) return m;
    m->base = info.dli_fbase;
    m->vendor = vendor;
    look_up(m, info.dli_fname);
    hip_used |= vendor == HIP;
    publish();
    return m;
  }
  untold.vendor = vendor;
  return &untold;
}

static void *poll_completions(void *arg);
static void watch_flights(void) { /* with the lock held */
  if (!poller) {
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the application's signals are not for us */
    poller = pthread_create(&thread, NULL, poll_completions, NULL) ? 0 : 1;
    if (poller) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
  } else if (poller_waits) {
    pthread_cond_signal(&work);
  }
}

static void called_back(void *number) {
  uint64_t n = (uint64_t)(uintptr_t)number;
  pthread_mutex_lock(&lock);
  if (n >= head && n < tail) flight[n % FLIGHTS].done = 1;
  settle(now_ns());
  pthread_mutex_unlock(&lock);
}

/* Whether what is launched there is only written down, for a graph. */
static int captured(const struct meter *m, A stream) {
  int status = 0;
  return m->capturing && stream != (A)MANY && !m->capturing(stream, &status) && status == CAPTURING;
}

/* After a launch has returned: have its completion told. Without a way it counts as done now. */
static void track(uint64_t n, struct meter *m, A stream, int bad) {
  A event = 0, home = 0;
  int mode = RELAXED, told = 0; /* our calls must not spoil a capture that goes on elsewhere */
  if (!bad && stream != (A)MANY && m->kind >= CALLBACKS) {
    int changed = m->exchange && !m->exchange(&mode);
    if (m->kind == EVENTS) {
      if (m->current) m->current(&home);
      pthread_mutex_lock(&lock);
      for (unsigned i = spares; i-- > 0 && !event;)
        if (spare_events[i].home == home) {
          event = spare_events[i].event;
          spare_events[i] = spare_events[--spares];
        }
      pthread_mutex_unlock(&lock);
      if (!event && m->create(&event, NO_TIMING)) event = 0;
      told = event && !m->record(event, stream);
    } else if (m->kind == CALLBACKS) {
      told = !m->call(stream, called_back, (void *)(uintptr_t)n);
    }
    if (changed) m->exchange(&mode);
  }
  pthread_mutex_lock(&lock);
  struct flight *f = &flight[n % FLIGHTS];
  if (m->kind == EVENTS && told) { f->event = event; f->home = home; }
  f->tracked = 1;
  if (!told && !(m->kind == COUNTED && !bad)) f->done = 1;
  settle(now_ns());
  if (told && m->kind == EVENTS) watch_flights();
  pthread_mutex_unlock(&lock);
}
/* Whether the device is done with a launch; an error is an end too: nothing will come any more. */
static int query_event(const struct flight *f) { return f->meter->query(f->event) != NOT_READY; }

/* Ask for the oldest launch until it is done, then for the next one; with the lock held. */
static uint64_t next_tracked(void) {
  uint64_t n = head;
  while (n < tail && (flight[n % FLIGHTS].done || !flight[n % FLIGHTS].event)) n++;
  return n;
}

static void landed(struct flight *f) {
  f->done = 1;
  if (f->meter->vendor != HSA && spares < FLIGHTS)
    spare_events[spares++] = (__typeof__(spare_events[0])){f->event, f->home};
  f->event = 0;
}

static void nap(uint64_t ns) { /* gives up the lock meanwhile */
  struct timespec t = {0, (long)ns};
  pthread_mutex_unlock(&lock);
  nanosleep(&t, NULL);
  pthread_mutex_lock(&lock);
}

static uint64_t (*read_index)(const void *queue);
static void *poll_completions(void *arg) {
  (void)arg;
  prctl(PR_SET_TIMERSLACK, 1000);
  int relaxed[METERS] = {0}; /* asking must not spoil a capture that goes on in another thread */
  pthread_mutex_lock(&lock);
  for (int calm = 0;;) {
    uint64_t n = next_tracked();
    if (n == tail && ++calm > 8) { /* nothing for a while: whoever launches next wakes us */
      poller_waits = 1;
      pthread_cond_wait(&work, &lock);
      poller_waits = calm = 0;
      continue;
    }
    if (n == tail) {
      settle(now_ns());
      nap(50000);
      continue;
    }
    calm = 0;
    struct flight *f = &flight[n % FLIGHTS], seen = *f;
    int done;
    if (f->meter->vendor == HSA) {
      done = read_index((const void *)f->event) > f->mark;
    } else {
      int mode = RELAXED, *once = &relaxed[seen.meter - meters];
      pthread_mutex_unlock(&lock);
      if (!*once && seen.meter->exchange) seen.meter->exchange(&mode);
      *once = 1;
      done = query_event(&seen);
      pthread_mutex_lock(&lock);
    }
    if (done && n >= head && f->event == seen.event) landed(f);
    if (done) continue;
    uint64_t now = now_ns(), left = 0;
    settle(now);
    /* most of what is left of it all by experience, so that the end is seen soon after */
    for (n = head; n < tail && left < 4000000; n++) left += estimate(flight[n % FLIGHTS].ident, 50000);
    uint64_t since = seen.launched_ns > last_done_ns ? seen.launched_ns : last_done_ns;
    left = left > now - since ? (left - (now - since)) * 3 / 4 : 0;
    nap(left < 50000 ? 50000 : left > 2000000 ? 2000000 : left);
  }
  return NULL;
}

/* The page says the least that is known of any vendor's completions in this process. */
static void publish(void) {
  int least = bells.kind ? bells.kind : COUNTED;
  for (int i = 0; i < METERS; i++)
    if (meters[i].kind && meters[i].kind < least) least = meters[i].kind;
  atomic_store(&me->completions, (uint32_t)least);
}

/* --- launches ------------------------------------------------------------------------------- */

#define BEYOND UINT64_MAX
static uint64_t take_off(struct meter *m, uint32_t ident) { /* with the lock held */
  uint64_t now = now_ns(), n = BEYOND;
  if (head == tail) atomic_store(&me->busy_since, now);
  if (tail - head < FLIGHTS) {
    n = tail++;
    flight[n % FLIGHTS] = (struct flight){.launched_ns = now, .ident = ident, .meter = m};
  } else {
    flight[(tail - 1) % FLIGHTS].more++;
  }
  atomic_fetch_add(&me->kernels, 1);
  atomic_fetch_or(&me->signature, 1ull << (ident * 2654435761u >> 26));
  atomic_fetch_add(&me->launched, 1);
  return n;
}

static A stream_of(const A *args, int where, int own) {
  A stream = where >= 0 ? args[where] : 0;
  if (where == MANY) return (A)MANY;
  if (where == IN_CONFIG && args[0]) stream = *(const A *)(args[0] + 32);
  return stream ? stream : own ? 2 : 0; /* 2: the calling thread's own */
}

/* An entry has a few variants, one for each library that brings it: what was looked up in one is
   never called in another. The first is what programs link to. */
struct entry { int vendor, kernel, where, own; };
struct way { launch_fn real; struct meter *meter; };
static long launch(const struct entry *e, struct way *w, PARAMS) {
  if (!w->real) return 500; /* CUDA_ERROR_NOT_FOUND, hipErrorNotFound */
  if (role == PASS || inside) return w->real(ARGS);
  const A args[] = {ARGS};
  A kernel = args[e->kernel], stream = stream_of(args, e->where, e->own);
  uint32_t ident = (uint32_t)(kernel ^ kernel >> 32);
  if (!real_dlsym) next("dlsym");
  pthread_mutex_lock(&lock);
  if (!w->meter || !w->meter->kind) w->meter = meter_of(e->vendor, w->real);
  struct meter *m = w->meter;
  pthread_mutex_unlock(&lock);
  if (captured(m, stream)) { /* nothing runs now */
    atomic_fetch_add(&me->captured, 1);
    return w->real(ARGS);
  }
  pthread_mutex_lock(&lock);
  if (role == OPPORTUNISTIC) pass_gate(ident);
  uint64_t n = take_off(m, ident);
  pthread_mutex_unlock(&lock);
  inside++;
  long bad = w->real(ARGS);
  inside--;
  if (n != BEYOND) track(n, m, stream, bad != 0);
  return bad;
}

enum { COPIES = 4 };
#define VARIANT(name, n) \
  HIDDEN long impl_##name##_of_##n(PARAMS) { return launch(&e_##name, &w_##name[n], ARGS); } \
  ENTRY(name##_of_##n) HIDDEN long name##_of_##n(PARAMS);
#define X(name, vendor, kernel, where, own) \
  static const struct entry e_##name = {vendor, kernel, where, own}; \
  static struct way w_##name[COPIES]; \
  HIDDEN long impl_##name(PARAMS) { \
    if (!w_##name[0].real) w_##name[0].real = (launch_fn)next(#name); \
    return launch(&e_##name, &w_##name[0], ARGS); } ENTRY(name) long name(PARAMS); \
  VARIANT(name, 1) VARIANT(name, 2) VARIANT(name, 3)
LAUNCHES(X)
#undef X

/* --- HSA queues ----------------------------------------------------------------------------- */

/* A program that writes packets itself rings a doorbell by these calls. A packet's end is not told:
   what the queue has taken in counts as done. Beneath HIP, whose own launches are gated, bells pass:
   its helper threads ring them. Source: hsa.h 1.2, hsa_queue_t. */
struct hsa_queue { uint32_t type, features; void *base; uint64_t doorbell; uint32_t size, pad; uint64_t id; };
static struct { _Atomic uint64_t doorbell; struct hsa_queue *queue; } queues[128];
static _Atomic int queue_count;

static int queue_of(uint64_t doorbell) {
  for (int i = 0, end = atomic_load(&queue_count); i < end; i++)
    if (atomic_load_explicit(&queues[i].doorbell, memory_order_relaxed) == doorbell) return i;
  return -1;
}

static void ring_bell(launch_fn real, PARAMS) {
  int i = a0 ? queue_of(a0) : -1;
  if (!real) return;
  if (i < 0 || role == PASS || inside || hip_used) { real(ARGS); return; }
  pthread_mutex_lock(&lock);
  if (!read_index) read_index = (uint64_t (*)(const void *))next("hsa_queue_load_read_index_relaxed");
  bells.kind = read_index ? STARTED : NO_COMPLETIONS;
  publish();
  if (role == OPPORTUNISTIC) pass_gate((uint32_t)i);
  uint64_t n = take_off(&bells, (uint32_t)i);
  pthread_mutex_unlock(&lock);
  real(ARGS);
  if (n == BEYOND) return;
  pthread_mutex_lock(&lock);
  struct flight *f = &flight[n % FLIGHTS];
  f->mark = a1;
  f->tracked = 1;
  if (read_index && queues[i].queue) { f->event = (A)queues[i].queue; watch_flights(); }
  else f->done = 1;
  settle(now_ns());
  pthread_mutex_unlock(&lock);
}

#define BELLS(X) X(hsa_signal_store_relaxed) X(hsa_signal_store_screlease) X(hsa_signal_store_release)
#define X(name) static launch_fn real_##name; \
  HIDDEN void impl_##name(PARAMS) { \
    if (!real_##name) real_##name = (launch_fn)next(#name); \
    ring_bell(real_##name, ARGS); } ENTRY(name) long name(PARAMS);
BELLS(X)
#undef X

static launch_fn real_hsa_queue_create, real_hsa_queue_destroy;
PUBLIC long hsa_queue_create(PARAMS) {
  if (!real_hsa_queue_create) real_hsa_queue_create = (launch_fn)next("hsa_queue_create");
  long bad = real_hsa_queue_create ? real_hsa_queue_create(ARGS) : 0x1000; /* HSA_STATUS_ERROR */
  struct hsa_queue *made = !bad && a7 ? *(struct hsa_queue **)a7 : NULL;
  if (!made) return bad;
  pthread_mutex_lock(&lock);
  int i = queue_of(0), end = atomic_load(&queue_count);
  if (i < 0 && end < 128) { i = end; }
  if (i >= 0) {
    queues[i].queue = made;
    atomic_store(&queues[i].doorbell, made->doorbell);
    if (i == end) atomic_store(&queue_count, end + 1);
  }
  pthread_mutex_unlock(&lock);
  return bad;
}
PUBLIC long hsa_queue_destroy(PARAMS) {
  pthread_mutex_lock(&lock);
  for (uint64_t n = head; n < tail; n++)
    if (flight[n % FLIGHTS].meter == &bells && flight[n % FLIGHTS].event == a0) landed(&flight[n % FLIGHTS]);
  for (int i = 0; i < atomic_load(&queue_count); i++)
    if ((A)queues[i].queue == a0) { atomic_store(&queues[i].doorbell, 0); queues[i].queue = NULL; }
  settle(now_ns());
  pthread_mutex_unlock(&lock);
  if (!real_hsa_queue_destroy) real_hsa_queue_destroy = (launch_fn)next("hsa_queue_destroy");
  return real_hsa_queue_destroy ? real_hsa_queue_destroy(ARGS) : 0x1000;
}

/* --- resolvers ------------------------------------------------------------------------------ */

static const struct { const char *name; void *ours[COPIES]; struct way *ways; } table[] = {
#define X(name, vendor, kernel, where, own) \
  {#name, {(void *)name, (void *)name##_of_1, (void *)name##_of_2, (void *)name##_of_3}, w_##name},
  LAUNCHES(X)
#undef X
};
static const struct { const char *name; void *ours; launch_fn *real; } plain[] = {
#define X(name) {#name, (void *)name, &real_##name},
  BELLS(X)
#undef X
  {"hsa_queue_create", (void *)hsa_queue_create, &real_hsa_queue_create},
  {"hsa_queue_destroy", (void *)hsa_queue_destroy, &real_hsa_queue_destroy},
};

/* What a resolver found is remembered as the real entry, and ours is handed out. */
static void *ours(const char *name, void *found) {
  for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
    if (!strcmp(name, plain[i].name)) {
      if (found && found != plain[i].ours) *plain[i].real = (launch_fn)found;
      return plain[i].ours;
    }
  for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
    if (strcmp(name, table[i].name)) continue;
    struct way *ways = table[i].ways;
    void *mine = NULL;
    pthread_mutex_lock(&names); /* never held while the loader is asked for anything */
    for (int n = 0; n < COPIES && !mine; n++) {
      if (!found || found == table[i].ours[n]) mine = table[i].ours[n];
      else if (!ways[n].real) ways[n].real = (launch_fn)found;
      if (ways[n].real == (launch_fn)found) mine = table[i].ours[n];
    }
    pthread_mutex_unlock(&names);
    return mine ? mine : table[i].ours[COPIES - 1]; /* a fifth library: the fourth is called */
  }
  return found;
}

/* Resolvers hand out resolvers: the CUDA runtime asks each for the next. */
typedef int (*address_fn)(const char *, void **, int, uint64_t, int *);
static address_fn real_v1, real_v2, real_hip;
static void *resolver(const char *name, int version, void *found) {
  address_fn *real = NULL;
  void *mine = found;
  if (!strcmp(name, "cuGetProcAddress_v2") || (version >= 12000 && !strcmp(name, "cuGetProcAddress")))
    { real = &real_v2; mine = (void *)cuGetProcAddress_v2; }
  else if (!strcmp(name, "cuGetProcAddress")) { real = &real_v1; mine = (void *)cuGetProcAddress; }
  else if (!strcmp(name, "hipGetProcAddress")) { real = &real_hip; mine = (void *)hipGetProcAddress; }
  if (real && found && found != mine) *real = (address_fn)found;
  return mine;
}

static int resolve(address_fn real, const char *name, void **out, int v, uint64_t f, int *status) {
  if (!real) return 500;
  int bad = real(name, out, v, f, status);
  if (bad || !name || !out || !*out) return bad;
  char per_thread[96];
  snprintf(per_thread, sizeof per_thread, "%s_ptsz", name);
  /* flag 2 asks for the per-thread default stream's variant */
  void *mapped = f & 2 ? ours(per_thread, *out) : *out;
  *out = mapped != *out ? mapped : resolver(name, v, ours(name, *out));
  return bad;
}
#define RESOLVER(real, name) (real ? real : (real = (address_fn)next(name)))
int cuGetProcAddress(const char *name, void **out, int v, uint64_t f) {
  return resolve(RESOLVER(real_v1, "cuGetProcAddress"), name, out, v, f, NULL);
}
int cuGetProcAddress_v2(const char *name, void **out, int v, uint64_t f, int *status) {
  return resolve(RESOLVER(real_v2, "cuGetProcAddress_v2"), name, out, v, f, status);
}
int hipGetProcAddress(const char *name, void **out, int v, uint64_t f, int *status) {
  return resolve(RESOLVER(real_hip, "hipGetProcAddress"), name, out, v, f, status);
}
static void *found_by(void *handle, const char *name) {
  void *found = real_dlsym ? real_dlsym(handle, name) : NULL;
  return found && name ? resolver(name, 0, ours(name, found)) : found;
}
/* "The next one" depends on who asks, which the real dlsym sees by the return address: this call has
   to be a jump, and another interposer then finds whoever comes after itself. */
PUBLIC void *dlsym(void *handle, const char *name) {
  if (!real_dlsym) next("dlsym");
  if (handle == RTLD_NEXT && real_dlsym) return real_dlsym(handle, name);
  return found_by(handle, name);
}
#endif
