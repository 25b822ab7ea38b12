/* Threads that share one range of elements at a time, and go on to the next without a rest.
 *
 * A caller hands over a function and a range, and may hand over another before it waits for the first. The threads take
 * blocks of a range from a common counter, so that a thread whose core is busy elsewhere takes fewer of them. Threads of
 * the interpreter were rejected: each block would pay for the interpreter's lock, which the thread that launches kernels
 * wants too. Plain POSIX threads instead of OpenMP: a second OpenMP runtime beside torch's own would have its own idea of
 * cores. One range at a time was rejected: between two of them the cores stood still for a tenth of the time.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

enum { MOST_WAITING = 2 };

typedef void (*range_function)(const void *job, int64_t start, int64_t end);

typedef struct {
    range_function function;
    const void *job;
    int64_t size, block;
    atomic_int_least64_t next;
    int working; /* threads that have not passed it */
} range;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t begin, end;
    uint64_t given, done; /* numbers of ranges; every thread passes all of them in order */
    range ranges[MOST_WAITING];
    int num_threads, stopping;
    pthread_t threads[];
} pool;

static void *work(void *argument) {
    pool *p = argument;
    pthread_mutex_lock(&p->lock);
    for (uint64_t passed = 0;; passed++) {
        while (p->given == passed && !p->stopping) pthread_cond_wait(&p->begin, &p->lock);
        if (p->given == passed) break;
        range *r = &p->ranges[passed % MOST_WAITING];
        pthread_mutex_unlock(&p->lock);
        int64_t start;
        while ((start = atomic_fetch_add(&r->next, r->block)) < r->size)
            r->function(r->job, start, r->size - start < r->block ? r->size : start + r->block);
        pthread_mutex_lock(&p->lock);
        if (--r->working == 0) {
            p->done++;
            pthread_cond_broadcast(&p->end);
        }
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

void pool_close(pool *p) {
    pthread_mutex_lock(&p->lock);
    p->stopping = 1;
    pthread_cond_broadcast(&p->begin);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->num_threads; i++) pthread_join(p->threads[i], NULL);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->begin);
    pthread_cond_destroy(&p->end);
    free(p);
}

/* One thread a core, free to move among these cores and no others. NULL if not even one thread could be made. */
pool *pool_open(const int32_t *cores, int32_t num_cores) {
    pool *p = calloc(1, sizeof(pool) + (size_t)num_cores * sizeof(pthread_t));
    if (!p) return NULL;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->begin, NULL);
    pthread_cond_init(&p->end, NULL);
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    for (int32_t i = 0; i < num_cores; i++)
        if (cores[i] < CPU_SETSIZE) CPU_SET(cores[i], &allowed);
    for (int32_t i = 0; i < num_cores; i++) {
        if (pthread_create(&p->threads[p->num_threads], NULL, work, p)) break;
        pthread_setaffinity_np(p->threads[p->num_threads], sizeof allowed, &allowed);
        p->num_threads++;
    }
    if (p->num_threads) return p;
    pool_close(p);
    return NULL;
}

/* Have `function` run over [0, size) in blocks; waits only if too many ranges wait already. The number of the range. */
uint64_t pool_begin(pool *p, range_function function, const void *job, int64_t size, int64_t block) {
    pthread_mutex_lock(&p->lock);
    while (p->given - p->done == MOST_WAITING) pthread_cond_wait(&p->end, &p->lock);
    range *r = &p->ranges[p->given % MOST_WAITING];
    r->function = function;
    r->job = job;
    r->size = size;
    r->block = block;
    atomic_store(&r->next, 0);
    r->working = p->num_threads;
    uint64_t number = ++p->given;
    pthread_cond_broadcast(&p->begin);
    pthread_mutex_unlock(&p->lock);
    return number;
}

/* Return when the range with this number is done. */
void pool_wait(pool *p, uint64_t number) {
    pthread_mutex_lock(&p->lock);
    while (p->done < number) pthread_cond_wait(&p->end, &p->lock);
    pthread_mutex_unlock(&p->lock);
}
