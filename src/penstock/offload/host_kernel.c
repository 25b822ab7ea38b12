/* AdamW on the CPU, bit for bit what the GPU kernel and the torch reference compute.
 *
 * One fixed order of IEEE operations: built with -ffp-contract=off, so that no multiply and add are fused, and with
 * denormals on whatever the calling thread had set. Each function handles a range of elements and knows nothing of
 * threads: the caller splits, which cannot change a bit because no element depends on another.
 * target_clones compiles every loop for AVX-512, AVX2 and the base machine; the loader picks one at run time, so the
 * build needs no -march=native and the library can be moved to another machine.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#ifdef CLONES_OFF
#define CLONES
#else
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#define DENORMALS_ON unsigned saved_mode = _mm_getcsr(); _mm_setcsr(saved_mode & ~0x8040u);
#define DENORMALS_BACK _mm_setcsr(saved_mode);
#elif defined(__aarch64__)
#define CLONES
#define DENORMALS_ON                                                   \
    uint64_t saved_mode;                                               \
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_mode));               \
    __asm__ volatile("msr fpcr, %0" ::"r"(saved_mode & ~(1ull << 24)));
#define DENORMALS_BACK __asm__ volatile("msr fpcr, %0" ::"r"(saved_mode));
#else
#define CLONES
#define DENORMALS_ON
#define DENORMALS_BACK
#endif

/* The scalars of one step, rounded to fp32 once by the caller. Must match the columns in kernels.py. */
typedef struct {
    float scale;      /* clip coefficient */
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float root_correction2; /* sqrt(1 - beta2^t) */
    float eps;
    float decay;      /* 1 - lr * weight_decay */
    float step_size;  /* lr / (1 - beta1^t) */
} coefficients;

static inline float bits_to_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }
static inline float from_bf16(uint16_t b) { return bits_to_float((uint32_t)b << 16); }

/* Master from weight and remainder: rounding half away from zero carried one into the weight when the remainder has
 * its top bit set, so take that one back. */
static inline float join(uint16_t weight, uint16_t remainder) {
    return bits_to_float((((uint32_t)weight - (remainder >> 15)) << 16) | remainder);
}

#define ADAMW(master, gradient, m, v)                                             \
    do {                                                                          \
        float g = (gradient) * c.scale;                                           \
        m = m * c.beta1 + g * c.one_minus_beta1;                                  \
        v = v * c.beta2 + (g * g) * c.one_minus_beta2;                            \
        float denominator = sqrtf(v) / c.root_correction2 + c.eps;                \
        master = master * c.decay - c.step_size * (m / denominator);              \
    } while (0)

CLONES void adamw_bf16(uint16_t *restrict weight, const uint16_t *restrict gradient, uint16_t *restrict remainder,
                       float *restrict first, float *restrict second, int64_t n, const coefficients *restrict scalars) {
    const coefficients c = *scalars;
    DENORMALS_ON
    for (int64_t i = 0; i < n; i++) {
        float master = join(weight[i], remainder[i]), m = first[i], v = second[i];
        ADAMW(master, from_bf16(gradient[i]), m, v);
        uint32_t bits = float_to_bits(master);
        weight[i] = (uint16_t)((bits >> 16) + ((bits >> 15) & 1));
        remainder[i] = (uint16_t)bits;
        first[i] = m;
        second[i] = v;
    }
    DENORMALS_BACK
}

CLONES void adamw_fp32(float *restrict weight, const float *restrict gradient, float *restrict first,
                       float *restrict second, int64_t n, const coefficients *restrict scalars) {
    const coefficients c = *scalars;
    DENORMALS_ON
    for (int64_t i = 0; i < n; i++) {
        float master = weight[i], m = first[i], v = second[i];
        ADAMW(master, gradient[i], m, v);
        weight[i] = master;
        first[i] = m;
        second[i] = v;
    }
    DENORMALS_BACK
}

/* What an update works on. Must match `_Job` in pool.py. */
typedef struct {
    uint16_t *remainder;
    float *first, *second;
    void *weight;
    const void *gradient;
    const coefficients *scalars;
    int32_t is_bf16;
} job;

/* Update elements [start, end) of a job: the form in which a pool of threads calls. */
void adamw_range(const job *j, int64_t start, int64_t end) {
    int64_t n = end - start;
    float *first = j->first + start, *second = j->second + start;
    if (j->is_bf16)
        adamw_bf16((uint16_t *)j->weight + start, (const uint16_t *)j->gradient + start, j->remainder + start, first,
                   second, n, j->scalars);
    else
        adamw_fp32((float *)j->weight + start, (const float *)j->gradient + start, first, second, n, j->scalars);
}

/* Sum of squares with a fixed tree: each span of 64 rows of 1024 lanes is added row by row into its lanes, then the
 * lanes are halved until one is left. Squares of bf16 and fp32 values are exact in a double. */
enum { ROWS = 64, LANES = 1024, SPAN = ROWS * LANES };

#define SPAN_SUMS(type, value)                                                     \
    for (int64_t start = 0; start < n; start += SPAN) {                            \
        double lanes[LANES] = {0};                                                 \
        int64_t left = n - start < SPAN ? n - start : SPAN;                        \
        for (int64_t row = 0; row < left; row += LANES) {                          \
            const type *restrict x = values + start + row;                         \
            int64_t width = left - row < LANES ? left - row : LANES;               \
            for (int64_t i = 0; i < width; i++) {                                  \
                double d = (double)value;                                          \
                lanes[i] += d * d;                                                 \
            }                                                                      \
        }                                                                          \
        for (int half = LANES / 2; half; half /= 2)                                \
            for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];            \
        *sums++ = lanes[0];                                                        \
    }

CLONES void span_sums_bf16(const uint16_t *restrict values, double *restrict sums, int64_t n) {
    DENORMALS_ON
    SPAN_SUMS(uint16_t, from_bf16(x[i]))
    DENORMALS_BACK
}

CLONES void span_sums_fp32(const float *restrict values, double *restrict sums, int64_t n) {
    DENORMALS_ON
    SPAN_SUMS(float, x[i])
    DENORMALS_BACK
}
