/* Loops whose items several threads compute, in any order.  A loop is alone, or one of many in a step whose threads stay
   together from its beginning to its end.

   A loop waits for its items and not for its threads: one that the system has stopped, since the process's event loop
   needs its core too, holds up the others only in the middle of an item. */

#include <sched.h>

#include "cpu.h"

#if defined(UNIT) && UNIT == 1
/* For a library without threads of its own: the loops are those of the library that has them, since a step's threads
   are known there alone. */
static void (*given_share)(int64_t threads, int64_t count, Item run, const void *of);
static int64_t (*given_worth)(int64_t threads, int64_t numbers);

void share(int64_t threads, int64_t count, Item run, const void *of) { given_share(threads, count, run, of); }
int64_t worth(int64_t threads, int64_t numbers) { return given_worth(threads, numbers); }

/* Loops are shared by these functions from now on; called before any other function of the library. */
void give_loops(void (*share_of)(int64_t, int64_t, Item, const void *), int64_t (*worth_of)(int64_t, int64_t)) {
    given_share = share_of, given_worth = worth_of;
}
#else
#define WORTH 32768          /* numbers of a loop below which waking threads takes longer than they save */
#define WORTH_TOGETHER 8192  /* the same if they are awake */
#define CLOSED 0xffffffffu   /* in place of an item's number, while the leader changes loops */
#define SPINS 256           /* looks for an item, about 15 us, before a thread lets others have its core */

/* state: number of the loop in its upper half, the next item of it in the lower one. */
typedef struct {
    uint64_t state;
    Item run;
    const void *of;
    int64_t count, done, members, leaving;
} Team;

typedef struct {
    Item run;
    const void *of;
    int64_t count;
} Loop;

static _Thread_local Team *team; /* of the step that this thread leads */

#define read(from) __atomic_load_n(&(from), __ATOMIC_ACQUIRE)
#define write(to, what) __atomic_store_n(&(to), what, __ATOMIC_RELEASE)

static void rest(int64_t looks) {
    if (looks % SPINS == 0) sched_yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Computes one item, if any is left.  The exchange fails if the leader has changed what was read. */
static int take_one(Team *is, int64_t thread) {
    uint64_t state = read(is->state);
    Item run = read(is->run);
    const void *of = read(is->of);
    int64_t item = (uint32_t)state;
    if (item == CLOSED || item >= read(is->count)) return 0;
    if (!__atomic_compare_exchange_n(&is->state, &state, state + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return 1;
    run(of, item, thread);
    __atomic_fetch_add(&is->done, 1, __ATOMIC_ACQ_REL);
    return 1;
}

static void lead(Team *is, const Loop *loop) {
    uint64_t number = ((read(is->state) >> 32) + 1) << 32;
    write(is->state, number | CLOSED);
    write(is->run, loop->run);
    write(is->of, loop->of);
    write(is->count, loop->count);
    write(is->done, 0);
    write(is->state, number);
    while (take_one(is, 0)) continue;
    for (int64_t looks = 1; read(is->done) < loop->count; looks++) rest(looks);
}

static void help(Team *is) {
    int64_t thread = __atomic_add_fetch(&is->members, 1, __ATOMIC_ACQ_REL);
    for (int64_t looks = 1; !read(is->leaving); looks++) {
        while (take_one(is, thread)) looks = 1;
        rest(looks);
    }
}

static void lead_alone(void *of) { lead(team, of); }

/* Calls a function, and gives the loops that it shares so many threads. */
void together(int64_t threads, void (*whole)(void *of), void *of) {
    if (threads <= 1 || team) {
        whole(of);
        return;
    }
    Team is = {0};
#pragma omp parallel num_threads(threads)
    {
#pragma omp master
        {
            team = &is;
            whole(of);
            team = 0;
            write(is.leaving, 1);
        }
        help(&is);
    }
}

/* Calls run(of, item, thread) for each item, on up to so many threads.  thread: below their number, of one at a time. */
void share(int64_t threads, int64_t count, Item run, const void *of) {
    Loop loop = {run, of, count};
    if (threads <= 1 || count <= 1)
        for (int64_t item = 0; item < count; item++) run(of, item, 0);
    else if (team)
        lead(team, &loop);
    else
        together(threads, lead_alone, &loop);
}

/* Returns so many threads if that many numbers are worth waking them, else 1. */
int64_t worth(int64_t threads, int64_t numbers) { return numbers > (team ? WORTH_TOGETHER : WORTH) ? threads : 1; }
#endif
