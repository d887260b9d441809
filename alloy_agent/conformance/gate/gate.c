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
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

typedef uintptr_t A;
#define PARAMS A a0, A a1, A a2, A a3, A a4, A a5, A a6, A a7, A a8, A a9, A a10, A a11
#define ARGS a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11
typedef long (*launch_fn)(PARAMS);
#define PUBLIC __attribute__((visibility("default")))

/* name, which argument names the kernel */
#define LAUNCHES(X) \
  X(cuLaunch) X(cuLaunchGrid) X(cuLaunchGridAsync) X(cuLaunchKernel) X(cuLaunchKernel_ptsz) \
  X(cuLaunchKernelEx) X(cuLaunchKernelEx_ptsz) X(cuLaunchCooperativeKernel) \
  X(cuLaunchCooperativeKernel_ptsz) X(cuGraphLaunch) X(cuGraphLaunch_ptsz) \
  X(hipLaunchKernel) X(hipLaunchKernel_spt) X(hipExtLaunchKernel) X(hipModuleLaunchKernel) \
  X(hipExtModuleLaunchKernel) X(hipLaunchCooperativeKernel) X(hipGraphLaunch) \
  X(emuLaunchKernel) X(emuGraphLaunch)

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
static _Atomic(uintptr_t) hook;
static int lost;

static void *receiver(void *arg) {
  int fd = (int)(intptr_t)arg;
  uint64_t count;
  for (;;) {
    ssize_t got = recv(fd, &count, sizeof count, 0);
    if (got < 0 && errno == EINTR) continue;
    pthread_mutex_lock(&lock);
    if (got == (ssize_t)sizeof count) atomic_store(&completed, count);
    else if (fd == sock) { lost = 1; atomic_store(&completed, atomic_load(&submitted)); }
    void (*fn)(uint64_t) = (void (*)(uint64_t))atomic_load(&hook);
    if (fn) fn(atomic_load(&completed));
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
  sock = -1; lost = 0; submitted = completed = 0;
  pthread_mutex_init(&lock, NULL);
}
__attribute__((constructor)) static void start(void) { pthread_atfork(NULL, NULL, forget); }

static long submit(uint32_t ident, uint32_t duration_us) {
  struct submit message = {ident, duration_us};
  pthread_mutex_lock(&lock);
  int bad = connect_device();
  if (!bad) {
    atomic_fetch_add(&submitted, 1);
    while (send(sock, &message, sizeof message, MSG_NOSIGNAL) < 0)
      if (errno != EINTR) { atomic_fetch_sub(&submitted, 1); bad = 1; break; }
  }
  pthread_mutex_unlock(&lock);
  return bad ? 999 : 0;
}

/* the kernel's handle is its number, the second argument its length in microseconds */
#define X(name) HIDDEN long impl_##name(PARAMS) { \
    (void)a2; (void)a3; (void)a4; (void)a5; (void)a6; (void)a7; (void)a8; (void)a9; (void)a10; (void)a11; \
    return submit((uint32_t)a0, (uint32_t)a1); } ENTRY(name)
LAUNCHES(X)
#undef X

PUBLIC long emuSynchronize(void) {
  pthread_mutex_lock(&lock);
  while (!lost && atomic_load(&completed) < atomic_load(&submitted))
    pthread_cond_wait(&changed, &lock);
  int bad = lost;
  pthread_mutex_unlock(&lock);
  return bad ? 999 : 0;
}
PUBLIC void emuOnComplete(void (*fn)(uint64_t)) { atomic_store(&hook, (uintptr_t)fn); }

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
  _Atomic uint32_t wake, spare;
  uint64_t pad[18];
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
static struct { uint64_t launched_ns; uint32_t ident; } flight[1024];
static double tokens_s, capped_s;
static uint64_t filled_ns;
static int hooked;

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
  if (!mine) return;
  for (int i = 0; i < SLOTS; i++) {
    uint32_t owner = atomic_load(&mine->slot[i].pid);
    if (owner && !syscall(SYS_kill, owner, 0)) continue;
    if (owner && errno != ESRCH) continue;
    if (!atomic_compare_exchange_strong(&mine->slot[i].pid, &owner, (uint32_t)getpid())) continue;
    me = &mine->slot[i];
    atomic_store(&me->ready, 0);
    memset((char *)me + 8, 0, sizeof *me - 8); /* a new process, a new generation */
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

static void forked(void) {
  pthread_mutex_init(&lock, NULL);
  hooked = 0;
  take_slot();
}

__attribute__((constructor)) static void start(void) {
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
             now < out->lease_until_ns && out->lease_until_ns - now < 10000000000ull &&
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

static uint64_t outstanding_ns(void) {
  uint64_t sum = 0, done = atomic_load(&me->completed), end = atomic_load(&me->launched);
  for (uint64_t i = done; i < end && i < done + 1024; i++)
    sum += estimate(flight[i % 1024].ident, 1000000);
  return sum;
}

static void pass_gate(uint32_t ident) {
  uint64_t begin = now_ns();
  atomic_fetch_add(&me->waiting, 1);
  for (;;) {
    struct order o;
    const struct slot *who;
    uint64_t now = now_ns(), since, bursts, delay = 1000000;
    atomic_store_explicit(&me->heartbeat, now, memory_order_relaxed);
    if (read_order(&o, now)) {
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
      delay = alloy_admit(&o, busy, since, bursts, tokens_s, capped_s, now, kernel, outstanding_ns());
      if (!delay) {
        tokens_s -= (double)kernel * 1e-9;
        capped_s -= (double)kernel * 1e-9;
        break;
      }
      if (delay == UINT64_MAX && !busy) { who = NULL; delay = 50000; } /* own completion */
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

static void finished(uint64_t count) {
  uint64_t now = now_ns();
  pthread_mutex_lock(&lock);
  uint64_t done = atomic_load(&me->completed), end = atomic_load(&me->launched);
  if (count > end) count = end;
  for (; done < count; done++) {
    uint64_t from = flight[done % 1024].launched_ns;
    if (from < last_done_ns) from = last_done_ns;
    uint64_t took = now > from ? now - from : 0, *k = &known_ns[flight[done % 1024].ident % IDENTS];
    /* what a kernel takes by itself is near its shortest times: others' work only adds to it */
    *k = !*k ? took : took < *k ? (*k + 3 * took) / 4 : *k + (took - *k) / 32;
    longest_ns = 0;
    for (int i = 0; i < IDENTS; i++) if (known_ns[i] > longest_ns) longest_ns = known_ns[i];
    atomic_fetch_add(&me->device_ns, took);
    last_done_ns = now;
  }
  atomic_store(&me->completed, done);
  if (done == end && atomic_load(&me->kernels)) {
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
  atomic_store_explicit(&me->heartbeat, now, memory_order_relaxed);
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
  static void *driver[3];
  static const char *const files[] = {"libcuda.so.1", "libamdhip64.so", "liballoyemu.so"};
  for (int i = 0; i < 3 && !at && real_dlsym; i++) {
    if (!driver[i]) driver[i] = dlopen(files[i], RTLD_LAZY | RTLD_NOLOAD);
    if (!driver[i] && i == 2 && getenv("ALLOY_EMU_LIBRARY"))
      driver[i] = dlopen(getenv("ALLOY_EMU_LIBRARY"), RTLD_LAZY | RTLD_NOLOAD);
    if (driver[i]) at = real_dlsym(driver[i], name);
  }
  return at;
}

static void hook_up(launch_fn real) {
  if (hooked) return;
  Dl_info info;
  void *home = dladdr((void *)real, &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
  void (*on)(void (*)(uint64_t)) =
      home ? (void (*)(void (*)(uint64_t)))real_dlsym(home, "emuOnComplete") : NULL;
  if (on) on(finished);
  hooked = on ? 1 : -1; /* -1: no completions, a launch counts as done at once */
}

static long launch(launch_fn real, PARAMS) {
  if (!real) return 500; /* CUDA_ERROR_NOT_FOUND */
  if (role == PASS) return real(ARGS);
  uint32_t ident = (uint32_t)(a0 ^ a0 >> 32);
  if (!real_dlsym) next("dlsym");
  pthread_mutex_lock(&lock);
  hook_up(real);
  if (role == OPPORTUNISTIC) pass_gate(ident);
  uint64_t now = now_ns(), n = atomic_load(&me->launched);
  if (n == atomic_load(&me->completed)) atomic_store(&me->busy_since, now);
  flight[n % 1024].launched_ns = now;
  flight[n % 1024].ident = ident;
  atomic_fetch_add(&me->kernels, 1);
  atomic_fetch_or(&me->signature, 1ull << (ident * 2654435761u >> 26));
  atomic_store(&me->launched, n + 1);
  pthread_mutex_unlock(&lock);
  long bad = real(ARGS);
  if (bad || hooked < 0) finished(n + 1);
  return bad;
}

#define X(name) static launch_fn real_##name; \
  HIDDEN long impl_##name(PARAMS) { \
    if (!real_##name) real_##name = (launch_fn)next(#name); \
    return launch(real_##name, ARGS); } ENTRY(name) long name(PARAMS);
LAUNCHES(X)
#undef X

static const struct { const char *name; void *ours; launch_fn *real; } table[] = {
#define X(name) {#name, (void *)name, &real_##name},
  LAUNCHES(X)
#undef X
};

/* What a resolver found is remembered as the real entry, and ours is handed out. */
static void *ours(const char *name, void *found) {
  for (size_t i = 0; name && i < sizeof table / sizeof *table; i++)
    if (!strcmp(name, table[i].name)) {
      if (found && found != table[i].ours) *table[i].real = (launch_fn)found;
      return table[i].ours;
    }
  return found;
}

typedef int (*address_fn)(const char *, void **, int, uint64_t, int *);
static int resolve(address_fn real, const char *name, void **out, int v, uint64_t f, int *status) {
  if (!real) return 500;
  int bad = real(name, out, v, f, status);
  if (bad || !out || !*out) return bad;
  char per_thread[96];
  snprintf(per_thread, sizeof per_thread, "%s_ptsz", name);
  /* flag 2 asks for the per-thread default stream's variant */
  void *mapped = f & 2 ? ours(per_thread, *out) : *out;
  *out = mapped != *out ? mapped : ours(name, *out);
  return bad;
}
PUBLIC int cuGetProcAddress(const char *name, void **out, int v, uint64_t f) {
  return resolve((address_fn)next("cuGetProcAddress"), name, out, v, f, NULL);
}
PUBLIC int cuGetProcAddress_v2(const char *name, void **out, int v, uint64_t f, int *status) {
  return resolve((address_fn)next("cuGetProcAddress_v2"), name, out, v, f, status);
}
PUBLIC int hipGetProcAddress(const char *name, void **out, int v, uint64_t f, int *status) {
  return resolve((address_fn)next("hipGetProcAddress"), name, out, v, f, status);
}
PUBLIC void *dlsym(void *handle, const char *name) {
  if (!real_dlsym) next("dlsym");
  void *found = real_dlsym ? real_dlsym(handle, name) : NULL;
  if (!found) return found;
  if (!strcmp(name, "cuGetProcAddress")) return (void *)cuGetProcAddress;
  if (!strcmp(name, "cuGetProcAddress_v2")) return (void *)cuGetProcAddress_v2;
  if (!strcmp(name, "hipGetProcAddress")) return (void *)hipGetProcAddress;
  return ours(name, found);
}
#endif
