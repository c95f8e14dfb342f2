/* A program that shares loops among threads as a step does, with team.c, and looks at what became of each item.
   tests/kernels/test_team.py compiles it with the sanitizer of threads, which knows these threads and not OpenMP's.

   It prints "shared", or what is wrong. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "team.c"

#define STEPS 20
#define LOOPS 1000
#define MOST_ITEMS 40

typedef struct {
    int64_t *results, *of_threads;
    int64_t count, added, threads;
} Job;

static void fail(const char *what, int64_t found, int64_t expected) {
    printf("%s: %d, not %d\n", what, (int)found, (int)expected);
    exit(1);
}

static void add_of(const void *of, int64_t item, int64_t thread) {
    const Job *job = of;
    if (item >= job->count) fail("item", item, job->count - 1);
    if (thread >= job->threads) fail("thread", thread, job->threads - 1);
    job->results[item] += job->added + item;
    job->of_threads[thread]++;
}

static void subtract_of(const void *of, int64_t item, int64_t thread) {
    const Job *job = of;
    if (item >= job->count) fail("item of the other loop", item, job->count - 1);
    job->results[item] -= job->added;
    job->of_threads[thread]++;
}

static void *helper(void *of) {
    help(of);
    return 0;
}

static void step(int64_t threads) {
    Team is = {0};
    pthread_t helpers[threads];
    int64_t results[MOST_ITEMS] = {0}, of_threads[threads], items = 0;
    for (int64_t thread = 0; thread < threads; thread++) of_threads[thread] = 0;
    for (int64_t thread = 1; thread < threads; thread++) pthread_create(helpers + thread, 0, helper, &is);
    team = &is;
    for (int64_t loop = 0; loop < LOOPS; loop++) {
        Job job = {results, of_threads, loop * 7 % MOST_ITEMS, loop, threads};
        share(threads, job.count, loop % 3 ? add_of : subtract_of, &job);
        items += job.count;
        for (int64_t item = 0; item < job.count; item++) {
            int64_t expected = loop % 3 ? loop + item : -loop;
            if (results[item] != expected) fail("result", results[item], expected);
            results[item] = 0;
        }
    }
    team = 0;
    write(is.leaving, 1);
    for (int64_t thread = 1; thread < threads; thread++) pthread_join(helpers[thread], 0);
    for (int64_t thread = 0; thread < threads; thread++) items -= of_threads[thread];
    if (items) fail("items left", items, 0);
}

int main(void) {
    for (int64_t threads = 1; threads <= 9; threads += 2)
        for (int64_t at = 0; at < STEPS; at++) step(threads);
    puts("shared");
}
