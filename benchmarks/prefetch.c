/* AdamW over arrays far larger than the caches, with and without asking for them ahead of the hardware.
 *
 *   gcc -O3 -march=x86-64-v4 -ffp-contract=off -fno-math-errno -DSTAGE=1 [-DAHEAD=512] prefetch.c -lm -lpthread
 *   ./a.out G_PARAMETERS THREADS
 *
 * STAGE 0 updates everything, 1 masters, 2 moments. Prints G parameters a second, four times. AHEAD is in elements; without
 * it nothing is asked for. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { ROW = 64, PART = 1 << 15, TIMES = 5 };
static const float scale = 0.7f, beta1 = 0.9f, rest1 = 0.1f, beta2 = 0.999f, rest2 = 0.001f, root = 0.3f, eps = 1e-8f,
                   decay = 1e-5f, step_size = 1e-3f;
static uint16_t *weight, *remainder_, *gradient;
static float *first, *second;
static int64_t count, next;
static pthread_barrier_t barrier;

static inline float as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline uint32_t as_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

#ifdef AHEAD
#define FETCH(array)                                                    \
    for (size_t byte = 0; byte < ROW * sizeof *(array); byte += 64)     \
        __builtin_prefetch((const char *)((array) + AHEAD) + byte)
#else
#define FETCH(array) (void)(array)
#endif

static void update(uint16_t *restrict w, uint16_t *restrict r, const uint16_t *restrict g, float *restrict m,
                   float *restrict v) {
    FETCH(g);
    FETCH(m);
    FETCH(v);
    if (STAGE != 2) {
        FETCH(w);
        FETCH(r);
    }
    for (int i = 0; i < ROW; i++) {
        float master = as_float((((uint32_t)w[i] - (r[i] >> 15)) << 16) | r[i]);
        float scaled = as_float((uint32_t)g[i] << 16) * scale;
        float m_new = m[i] * beta1 + scaled * rest1, v_new = v[i] * beta2 + (scaled * scaled) * rest2;
        if (STAGE != 2) {
            master = master - (decay * master + step_size * (m_new / (sqrtf(v_new) / root + eps)));
            uint32_t bits = as_bits(master);
            w[i] = (uint16_t)((bits >> 16) + ((bits >> 15) & 1));
            r[i] = (uint16_t)bits;
        }
        if (STAGE != 1) m[i] = m_new, v[i] = v_new;
    }
}

static void *work(void *number) {
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET((long)number, &core);
    pthread_setaffinity_np(pthread_self(), sizeof core, &core);
    for (int64_t at; (at = __atomic_fetch_add(&next, PART, __ATOMIC_RELAXED)) < count;)
        for (int64_t i = at; i < at + PART; i++) {
            weight[i] = 0x3f80 + (i & 63), remainder_[i] = (uint16_t)(i * 7), gradient[i] = 0x3a00 + (i & 127);
            first[i] = 1e-3f, second[i] = 1e-6f;
        }
    for (int time = 0; time < TIMES; time++) {
        struct timespec began, ended;
        pthread_barrier_wait(&barrier);
        if (!number) next = 0;
        pthread_barrier_wait(&barrier);
        clock_gettime(CLOCK_MONOTONIC, &began);
        for (int64_t at; (at = __atomic_fetch_add(&next, PART, __ATOMIC_RELAXED)) < count;)
            for (int64_t i = at; i < at + PART; i += ROW)
                update(weight + i, remainder_ + i, gradient + i, first + i, second + i);
        pthread_barrier_wait(&barrier);
        clock_gettime(CLOCK_MONOTONIC, &ended);
        double seconds = (double)(ended.tv_sec - began.tv_sec) + (double)(ended.tv_nsec - began.tv_nsec) / 1e9;
        if (!number && time) printf("%.2f ", (double)count / seconds / 1e9);
    }
    return NULL;
}

static void *take(size_t num_bytes) {
    void *memory = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(memory, num_bytes, MADV_HUGEPAGE);
    return memory;
}

int main(int given, char **values) {
    if (given != 3) return fprintf(stderr, "usage: a.out G_PARAMETERS THREADS\n"), 2;
    count = (int64_t)(atof(values[1]) * 1e9) / PART * PART;
    long threads = atol(values[2]);
    pthread_t made[threads];
    weight = take(2 * count), remainder_ = take(2 * count), gradient = take(2 * count);
    first = take(4 * count), second = take(4 * count);
    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    for (long number = 0; number < threads; number++) pthread_create(made + number, NULL, work, (void *)number);
    for (long number = 0; number < threads; number++) pthread_join(made[number], NULL);
    puts("");
    return 0;
}
