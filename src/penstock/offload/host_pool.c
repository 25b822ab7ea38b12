/* Threads that share one range of elements at a time.
 *
 * A caller hands over a function and a range and sleeps until all of it is done. The threads take blocks of the range
 * from a common counter, so that a thread whose core is busy elsewhere takes fewer of them. Threads of the interpreter
 * were rejected: each block would pay for the interpreter's lock, which the thread that launches kernels wants too.
 * Plain POSIX threads instead of OpenMP: a second OpenMP runtime beside torch's own would have its own idea of cores.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

typedef void (*range_function)(const void *job, int64_t start, int64_t end);

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t begin, end;
    uint64_t round; /* counts ranges; a thread that sees a new number goes to work */
    int num_threads, working, stopping;
    range_function function;
    const void *job;
    int64_t size, block;
    atomic_int_least64_t next;
    pthread_t threads[];
} pool;

static void *work(void *argument) {
    pool *p = argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (p->round == seen && !p->stopping) pthread_cond_wait(&p->begin, &p->lock);
        if (p->stopping) break;
        seen = p->round;
        pthread_mutex_unlock(&p->lock);
        int64_t start;
        while ((start = atomic_fetch_add(&p->next, p->block)) < p->size)
            p->function(p->job, start, p->size - start < p->block ? p->size : start + p->block);
        pthread_mutex_lock(&p->lock);
        if (--p->working == 0) pthread_cond_signal(&p->end);
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

/* Run `function` over [0, size) in blocks and return when all of it is done. One caller at a time. */
void pool_run(pool *p, range_function function, const void *job, int64_t size, int64_t block) {
    pthread_mutex_lock(&p->lock);
    p->function = function;
    p->job = job;
    p->size = size;
    p->block = block;
    atomic_store(&p->next, 0);
    p->working = p->num_threads;
    p->round++;
    pthread_cond_broadcast(&p->begin);
    while (p->working) pthread_cond_wait(&p->end, &p->lock);
    pthread_mutex_unlock(&p->lock);
}
