/* AdamW on the CPU, bit for bit what the GPU kernel and the torch reference compute.
 *
 * One fixed order of IEEE operations: built with -ffp-contract=off, so that no multiply and add are fused, and with
 * denormals on whatever the calling thread had set. Each function handles a range of elements and knows nothing of
 * threads: the caller splits, which cannot change a bit because no element depends on another, and in int8 no block.
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
#define DENORMALS_ON                                                              \
    uint64_t saved_mode;                                                          \
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_mode));                          \
    __asm__ volatile("msr fpcr, %0" ::"r"(saved_mode & ~(1ull << 24)));
#define DENORMALS_BACK __asm__ volatile("msr fpcr, %0" ::"r"(saved_mode));
#else
#define CLONES
#define DENORMALS_ON
#define DENORMALS_BACK
#endif

/* The scalars of one step, rounded to fp32 once by the caller. Must match the columns in adamw.py. */
typedef struct {
    float scale;      /* clip coefficient */
    float go;         /* the caller has looked at it */
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float root_correction2; /* sqrt(1 - beta2^t) */
    float eps;
    float decay;      /* lr * weight_decay */
    float step_size;  /* lr / (1 - beta1^t) */
    float seed;       /* of the step, a whole number */
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
        master = master - (c.decay * master + c.step_size * (m / denominator));   \
    } while (0)

/* How the formats round is said in moments.py; here is the same, in the same order. */
enum { BLOCK = 256 };

static inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

static inline uint16_t round_to_bf16(float x, uint32_t random) {
    uint32_t bits = float_to_bits(x);
    return (uint16_t)((bits + ((bits & 0x7fffffffu) < 0x7f7f0000u ? random : 0)) >> 16);
}

static inline float first_share(int32_t code) {
    float x = (float)code * (float)(1.0 / 127);
    return x * fabsf(x);
}

static inline float second_share(int32_t code) {
    float x = (float)code * (float)(1.0 / 255), square = x * x;
    return square * square;
}

/* x is not negative, so its bits are ordered as it is; a comparison of floats would become a branch. */
static inline float at_most_one(float x) {
    uint32_t bits = float_to_bits(x);
    return bits_to_float(bits < 0x3f800000u ? bits : 0x3f800000u);
}

static inline int32_t goes_up(float share, float low, float high, uint32_t random) {
    float chance = (float)(int32_t)(random * 2 + 1) * 0x1p-17f;
    return chance * (high - low) < share - low;
}

static inline int8_t first_code(float m, float inverse, uint32_t random) {
    float share = at_most_one(fabsf(m) * inverse);
    int32_t below = (int32_t)(sqrtf(share) * 127.0f);
    below = below < 126 ? below : 126;
    int32_t code = below + goes_up(share, first_share(below), first_share(below + 1), random);
    int32_t sign = (int32_t)float_to_bits(m) >> 31; /* all ones under a minus: a branch would stop the vectorizer */
    return (int8_t)((code ^ sign) - sign);
}

static inline uint8_t second_code(float v, float root, float inverse, float inverse_root, uint32_t random) {
    float share = at_most_one(v * inverse);
    int32_t below = (int32_t)(sqrtf(at_most_one(root * inverse_root)) * 255.0f);
    below = below < 254 ? below : 254;
    int32_t code = below + goes_up(share, second_share(below), second_share(below + 1), random);
    int32_t smallest = float_to_bits(v) ? 4 : 0;
    return (uint8_t)(code > smallest ? code : smallest);
}

static inline float scale_of(uint32_t largest) {
    if (largest == 0) return 0.0f;
    largest = largest > 0x10800000u ? largest : 0x10800000u;
    return bits_to_float(largest < 0x7f7fffffu ? largest : 0x7f7fffffu);
}

/* The two kinds of weight. */
#define MASTER_bf16(i) join(weight[i], remainder[i])
#define MASTER_fp32(i) weight[i]
#define GRADIENT_bf16(i) from_bf16(gradient[i])
#define GRADIENT_fp32(i) gradient[i]
#define KEEP_bf16(i, master)                                                      \
    do {                                                                          \
        uint32_t bits = float_to_bits(master);                                    \
        weight[i] = (uint16_t)((bits >> 16) + ((bits >> 15) & 1));                \
        remainder[i] = (uint16_t)bits;                                            \
    } while (0)
#define KEEP_fp32(i, master) weight[i] = master

/* An update may be made in two: first the master, which the next forward waits for, later the moments, from the same
 * gradient. A third of the bytes of fp32 state is then not in the way of that forward. */
enum { WHOLE, MASTER, MOMENTS };

/* Asked for before they are needed: the hardware's own prefetch stops at every page of 4 KiB, and five arrays have one
 * every few hundred elements. On 14 cores of an H200's host a master then takes 0.130 ns instead of 0.156, a whole update
 * 0.174 instead of 0.193 (benchmarks/results/2026-11-16-h200/README.md). */
enum { ROW = 64, AHEAD = 512 };
#define FETCH(array, from)                                                        \
    for (size_t byte = 0; byte < ROW * sizeof *(array); byte += 64)               \
        __builtin_prefetch((const char *)((array) + (from) + AHEAD) + byte)
#define FETCH_ROW(from)                                                           \
    do {                                                                          \
        FETCH(gradient, from);                                                    \
        FETCH(first, from);                                                       \
        FETCH(second, from);                                                      \
        if (stage != MOMENTS) FETCH(weight, from);                                \
        if (stage != MOMENTS && sizeof *weight == 2) FETCH(remainder, from);      \
    } while (0)

/* The three formats. */
#define ELEMENT_fp32(kind, i)                                                     \
    do {                                                                          \
        float master = MASTER_##kind(i), m = first[i], v = second[i];             \
        ADAMW(master, GRADIENT_##kind(i), m, v);                                  \
        if (stage != MOMENTS) KEEP_##kind(i, master);                             \
        if (stage != MASTER) first[i] = m, second[i] = v;                         \
    } while (0)

#define ELEMENT_bf16(kind, i)                                                     \
    do {                                                                          \
        float master = MASTER_##kind(i), m = from_bf16(first[i]), v = from_bf16(second[i]); \
        ADAMW(master, GRADIENT_##kind(i), m, v);                                  \
        if (stage != MOMENTS) KEEP_##kind(i, master);                             \
        if (stage == MASTER) break;                                               \
        uint32_t random = mix(((uint32_t)start + (uint32_t)(i)) ^ key);           \
        first[i] = round_to_bf16(m, random & 0xffff);                             \
        second[i] = round_to_bf16(v, random >> 16);                               \
    } while (0)

#define UPDATE_ROWS(format, kind)                                                 \
    int64_t at = 0;                                                               \
    for (; at + ROW <= n; at += ROW) {                                            \
        FETCH_ROW(at);                                                            \
        for (int j = 0; j < ROW; j++) ELEMENT_##format(kind, at + j);             \
    }                                                                             \
    for (; at < n; at++) ELEMENT_##format(kind, at);
#define UPDATE_fp32(kind) UPDATE_ROWS(fp32, kind)
#define UPDATE_bf16(kind) UPDATE_ROWS(bf16, kind)

#define UPDATE_int8(kind)                                                         \
    for (int64_t block = 0; block < n; block += BLOCK, first_scale++, second_scale++) { \
        float ms[BLOCK], vs[BLOCK], roots[BLOCK];                                 \
        const float m_scale = *first_scale, v_scale = *second_scale;              \
        const int32_t width = n - block < BLOCK ? (int32_t)(n - block) : BLOCK;   \
        uint32_t m_largest = 0, v_largest = 0;                                    \
        for (int32_t row = 0; row < BLOCK; row += ROW) FETCH_ROW(block + row);    \
        for (int32_t j = 0; j < width; j++) {                                     \
            const int64_t i = block + j;                                          \
            float master = MASTER_##kind(i);                                      \
            float m = first_share(first[i]) * m_scale, v = second_share(second[i]) * v_scale; \
            ADAMW(master, GRADIENT_##kind(i), m, v);                              \
            if (stage != MOMENTS) KEEP_##kind(i, master);                         \
            if (stage == MASTER) continue;                                        \
            ms[j] = m, vs[j] = v, roots[j] = sqrtf(v);                            \
            const uint32_t m_bits = float_to_bits(m) & 0x7fffffffu, v_bits = float_to_bits(v) & 0x7fffffffu; \
            m_largest = m_bits > m_largest ? m_bits : m_largest;                  \
            v_largest = v_bits > v_largest ? v_bits : v_largest;                  \
        }                                                                         \
        if (stage == MASTER) continue;                                            \
        *first_scale = scale_of(m_largest), *second_scale = scale_of(v_largest);  \
        const float m_inverse = 1.0f / (m_largest ? *first_scale : 1.0f);         \
        const float v_divisor = v_largest ? *second_scale : 1.0f;                 \
        const float v_inverse = 1.0f / v_divisor, root_inverse = 1.0f / sqrtf(v_divisor); \
        for (int32_t j = 0; j < width; j++) {                                     \
            uint32_t random = mix(((uint32_t)(start + block) + (uint32_t)j) ^ key); \
            first[block + j] = first_code(ms[j], m_inverse, random & 0xffff);     \
            second[block + j] = second_code(vs[j], roots[j], v_inverse, root_inverse, random >> 16); \
        }                                                                         \
    }

/* One function for each kind of weight, format and stage, all called alike. `start` is the index of the first element in
 * its parameter, `salt` the number of the parameter; a range of int8 begins with a block. */
#define DEFINE_STAGE(stage_, kind, format, weight_t, first_t, second_t)           \
    CLONES void adamw_##kind##_##format##_##stage_(                               \
        weight_t *restrict weight, const weight_t *restrict gradient, uint16_t *restrict remainder, \
        first_t *restrict first, second_t *restrict second, float *restrict first_scale, float *restrict second_scale, \
        const coefficients *restrict scalars, int64_t n, int64_t start, uint32_t salt) { \
        const int stage = stage_;                                                  \
        const coefficients c = *scalars;                                          \
        const uint32_t key = mix(mix((uint32_t)c.seed) ^ salt);                   \
        (void)remainder, (void)first_scale, (void)second_scale, (void)start, (void)key; \
        DENORMALS_ON                                                              \
        UPDATE_##format(kind)                                                     \
        DENORMALS_BACK                                                            \
    }

#define DEFINE(...)                                                               \
    DEFINE_STAGE(WHOLE, __VA_ARGS__)                                              \
    DEFINE_STAGE(MASTER, __VA_ARGS__)                                             \
    DEFINE_STAGE(MOMENTS, __VA_ARGS__)

DEFINE(bf16, fp32, uint16_t, float, float)
DEFINE(fp32, fp32, float, float, float)
DEFINE(bf16, bf16, uint16_t, uint16_t, uint16_t)
DEFINE(fp32, bf16, float, uint16_t, uint16_t)
DEFINE(bf16, int8, uint16_t, int8_t, uint8_t)
DEFINE(fp32, int8, float, int8_t, uint8_t)

/* What an update works on: one of the functions above by its number, and what it is called with. Must match `_Job` in
 * adamw.py. */
typedef struct {
    void *weight;
    const void *gradient;
    uint16_t *remainder;
    void *first, *second;
    float *first_scale, *second_scale;
    const coefficients *scalars;
    int64_t start;
    uint32_t salt;
    int32_t function;
} job;

#define CALL_STAGE(number, stage, kind, format, weight_t, first_t, second_t)      \
    case 3 * number + stage:                                                      \
        adamw_##kind##_##format##_##stage(                                        \
            (weight_t *)j->weight + from, (const weight_t *)j->gradient + from, j->remainder + from, \
            (first_t *)j->first + from, (second_t *)j->second + from, j->first_scale + from / BLOCK, \
            j->second_scale + from / BLOCK, j->scalars, to - from, j->start + from, j->salt); \
        break;

#define CALL(number, ...)                                                         \
    CALL_STAGE(number, WHOLE, __VA_ARGS__)                                        \
    CALL_STAGE(number, MASTER, __VA_ARGS__)                                       \
    CALL_STAGE(number, MOMENTS, __VA_ARGS__)

/* Update elements [from, to) of a job: the form in which a pool of threads calls. `from` is the start of a block. */
void adamw_range(const job *j, int64_t from, int64_t to) {
    switch (j->function) {
        CALL(0, bf16, fp32, uint16_t, float, float)
        CALL(1, fp32, fp32, float, float, float)
        CALL(2, bf16, bf16, uint16_t, uint16_t, uint16_t)
        CALL(3, fp32, bf16, float, uint16_t, uint16_t)
        CALL(4, bf16, int8, uint16_t, int8_t, uint8_t)
        CALL(5, fp32, int8, float, int8_t, uint8_t)
    }
}

/* Sum of squares with a fixed tree: each span of 64 rows of 1024 lanes is added row by row into its lanes, then the
 * lanes are halved until one is left. Squares of bf16 and fp32 values are exact in a double. */
enum { ROWS = 64, LANES = 1024, SPAN = ROWS * LANES };

#define SPAN_SUMS(type, value)                                                    \
    for (int64_t start = 0; start < n; start += SPAN) {                           \
        double lanes[LANES] = {0};                                                \
        int64_t left = n - start < SPAN ? n - start : SPAN;                       \
        for (int64_t row = 0; row < left; row += LANES) {                         \
            const type *restrict x = values + start + row;                        \
            int64_t width = left - row < LANES ? left - row : LANES;              \
            for (int64_t i = 0; i < width; i++) {                                 \
                double d = (double)value;                                         \
                lanes[i] += d * d;                                                \
            }                                                                     \
        }                                                                         \
        for (int half = LANES / 2; half; half /= 2)                               \
            for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];           \
        *sums++ = lanes[0];                                                       \
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
