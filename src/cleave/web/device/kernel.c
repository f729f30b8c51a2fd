// The arithmetic of a browser device, for WebAssembly with 128-bit SIMD: products, norms, softmax, activations,
// number formats, optimizer steps. Matrices are fp32 in linear memory, which the JavaScript side lays out; nothing here
// allocates. Everything is computed in fp32 or better, as the protocol asks (docs/protocol.md, "Precision").
//
// Built by `make wasm`; the committed .wasm files are compared with a fresh build in CI.

#include <stdint.h>
#include <wasm_simd128.h>

#define EXPORT(name) __attribute__((export_name(#name))) name
#define IMPORT(name) __attribute__((import_module("env"), import_name(#name))) extern

IMPORT(log) double env_log(double x);

typedef float f32;
typedef v128_t v4;

static inline f32 square_root(f32 x) { return __builtin_sqrtf(x); }
static inline int least(int a, int b) { return a < b ? a : b; }
static inline v4 load(const f32 *from) { return wasm_v128_load(from); }
static inline void store(f32 *to, v4 x) { wasm_v128_store(to, x); }
static inline v4 splat(f32 x) { return wasm_f32x4_splat(x); }
static inline v4 add(v4 a, v4 b) { return wasm_f32x4_add(a, b); }
static inline v4 sub(v4 a, v4 b) { return wasm_f32x4_sub(a, b); }
static inline v4 mul(v4 a, v4 b) { return wasm_f32x4_mul(a, b); }

#ifdef RELAXED
static inline v4 add_product(v4 total, v4 a, v4 b) { return __builtin_wasm_relaxed_madd_f32x4(a, b, total); }
#else
static inline v4 add_product(v4 total, v4 a, v4 b) { return add(total, mul(a, b)); }
#endif

static inline f32 lanes_sum(v4 x) {
    return (wasm_f32x4_extract_lane(x, 0) + wasm_f32x4_extract_lane(x, 1)) +
           (wasm_f32x4_extract_lane(x, 2) + wasm_f32x4_extract_lane(x, 3));
}

// Apply `body` to n numbers, four at a time, and the last ones in a padded vector.
#define EACH_4(n, body, tail_in, tail_out)                                                                             \
    do {                                                                                                               \
        int i = 0;                                                                                                     \
        for (; i + 4 <= (n); i += 4) body                                                                              \
        for (; i < (n); i++) { tail_in; tail_out; }                                                                    \
    } while (0)

// ---------------------------------------------------------------------------------------------- products

enum { TILE_ROWS = 4, TILE_COLS = 8, BLOCK_ROWS = 96, BLOCK_INNER = 256, BLOCK_COLS = 512 };

static f32 packed_a[BLOCK_ROWS * BLOCK_INNER] __attribute__((aligned(16)));
static f32 packed_b[BLOCK_INNER * BLOCK_COLS] __attribute__((aligned(16)));

// Lay out `count` vectors of `inner` numbers in groups of `width`, interleaved, and fill the last group with zeros.
static void pack(f32 *to, const f32 *from, int count, int inner, int stride, int inner_stride, int width) {
    for (int first = 0; first < count; first += width) {
        int here = least(width, count - first);
        const f32 *group = from + (long)first * stride;
        if (here == width && stride == 1) {
            for (int k = 0; k < inner; k++, to += width)
                for (int j = 0; j < width; j += 4) store(to + j, load(group + (long)k * inner_stride + j));
            continue;
        }
        for (int k = 0; k < inner; k++) {
            const f32 *row = group + (long)k * inner_stride;
            int j = 0;
            for (; j < here; j++) to[j] = row[(long)j * stride];
            for (; j < width; j++) to[j] = 0;
            to += width;
        }
    }
}

static inline void put(f32 *c, v4 x, int adds) { store(c, adds ? add(load(c), x) : x); }

// One tile of 4 x 8, all of it inside C.
static void whole_tile(f32 *c, long stride, const f32 *a, const f32 *b, int inner, int adds) {
    v4 c00 = splat(0), c01 = c00, c10 = c00, c11 = c00, c20 = c00, c21 = c00, c30 = c00, c31 = c00;
    for (int k = 0; k < inner; k++, a += TILE_ROWS, b += TILE_COLS) {
        v4 b0 = load(b), b1 = load(b + 4), x;
        x = wasm_v128_load32_splat(a);
        c00 = add_product(c00, x, b0), c01 = add_product(c01, x, b1);
        x = wasm_v128_load32_splat(a + 1);
        c10 = add_product(c10, x, b0), c11 = add_product(c11, x, b1);
        x = wasm_v128_load32_splat(a + 2);
        c20 = add_product(c20, x, b0), c21 = add_product(c21, x, b1);
        x = wasm_v128_load32_splat(a + 3);
        c30 = add_product(c30, x, b0), c31 = add_product(c31, x, b1);
    }
    put(c, c00, adds), put(c + 4, c01, adds), c += stride;
    put(c, c10, adds), put(c + 4, c11, adds), c += stride;
    put(c, c20, adds), put(c + 4, c21, adds), c += stride;
    put(c, c30, adds), put(c + 4, c31, adds);
}

static void tile(f32 *c, long stride, const f32 *a, const f32 *b, int inner, int rows, int cols, int adds) {
    if (rows >= TILE_ROWS && cols >= TILE_COLS) {
        whole_tile(c, stride, a, b, inner, adds);
        return;
    }
    f32 whole[TILE_ROWS * TILE_COLS] __attribute__((aligned(16)));
    whole_tile(whole, TILE_COLS, a, b, inner, 0);
    for (int i = 0; i < rows && i < TILE_ROWS; i++)
        for (int j = 0; j < cols && j < TILE_COLS; j++)
            c[i * stride + j] = whole[i * TILE_COLS + j] + (adds ? c[i * stride + j] : 0);
}

// C = A B, or C += A B. Strides are in numbers; rows of C are contiguous, `stride` apart.
void EXPORT(product)(f32 *c, int stride, const f32 *a, int a_row, int a_col, const f32 *b, int b_row, int b_col,
                     int rows, int cols, int inner, int adds) {
    for (int left = 0; left < cols; left += BLOCK_COLS) {
        int width = least(BLOCK_COLS, cols - left);
        for (int begin = 0; begin < inner; begin += BLOCK_INNER) {
            int depth = least(BLOCK_INNER, inner - begin), sums = adds || begin > 0;
            pack(packed_b, b + (long)begin * b_row + (long)left * b_col, width, depth, b_col, b_row, TILE_COLS);
            for (int top = 0; top < rows; top += BLOCK_ROWS) {
                int height = least(BLOCK_ROWS, rows - top);
                pack(packed_a, a + (long)top * a_row + (long)begin * a_col, height, depth, a_row, a_col, TILE_ROWS);
                for (int j = 0; j < width; j += TILE_COLS)
                    for (int i = 0; i < height; i += TILE_ROWS)
                        tile(c + (long)(top + i) * stride + left + j, stride, packed_a + i * depth, packed_b + j * depth,
                             depth, height - i, width - j, sums);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------- elementary functions

// e^x to within two units in the last place; x is clamped to where the result is a normal number, NaN stays NaN.
static inline v4 exponential(v4 x) {
    x = wasm_f32x4_min(wasm_f32x4_max(x, splat(-87.3f)), splat(88.7f));
    v4 n = wasm_f32x4_nearest(mul(x, splat(1.44269504f)));
    v4 r = sub(sub(x, mul(n, splat(0.693359375f))), mul(n, splat(-2.12194440e-4f)));
    v4 p = splat(1.9875691500e-4f);
    p = add(mul(p, r), splat(1.3981999507e-3f));
    p = add(mul(p, r), splat(8.3334519073e-3f));
    p = add(mul(p, r), splat(4.1665795894e-2f));
    p = add(mul(p, r), splat(1.6666665459e-1f));
    p = add(mul(p, r), splat(5.0000001201e-1f));
    p = add(add(mul(mul(p, r), r), r), splat(1));
    v4 power = wasm_i32x4_shl(wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(n), wasm_i32x4_splat(126)), 23);
    return mul(mul(p, power), splat(2));  // 2^(n-1) and 2 rather than 2^n, which may be too large
}

static inline f32 exponential_1(f32 x) { return wasm_f32x4_extract_lane(exponential(splat(x)), 0); }

static inline v4 sigmoid(v4 x) { return wasm_f32x4_div(splat(1), add(splat(1), exponential(wasm_f32x4_neg(x)))); }

// erf as x P(x^2) / Q(x^2), within 4e-7.
static inline v4 error_function(v4 x) {
    x = wasm_f32x4_min(wasm_f32x4_max(x, splat(-4)), splat(4));
    v4 s = mul(x, x), p = splat(-2.72614225801306e-10f), q = splat(-1.45660718464996e-05f);
    p = add(mul(p, s), splat(2.77068142495902e-08f));
    p = add(mul(p, s), splat(-2.10102402082508e-06f));
    p = add(mul(p, s), splat(-5.69250639462346e-05f));
    p = add(mul(p, s), splat(-7.34990630326855e-04f));
    p = add(mul(p, s), splat(-2.95459980854025e-03f));
    p = add(mul(p, s), splat(-1.60960333262415e-02f));
    q = add(mul(q, s), splat(-2.13374055278905e-04f));
    q = add(mul(q, s), splat(-1.68282697438203e-03f));
    q = add(mul(q, s), splat(-7.37332916720468e-03f));
    q = add(mul(q, s), splat(-1.42647390514189e-02f));
    return wasm_f32x4_div(mul(x, p), q);
}

// ---------------------------------------------------------------------------------------------- entry by entry

void EXPORT(fill)(f32 *to, f32 value, int n) {
    v4 x = splat(value);
    EACH_4(n, { store(to + i, x); }, , to[i] = value);
}

void EXPORT(add_to)(f32 *total, const f32 *x, int n) {
    EACH_4(n, { store(total + i, add(load(total + i), load(x + i))); }, , total[i] += x[i]);
}

void EXPORT(scale_by)(f32 *x, f32 factor, int n) {
    v4 f = splat(factor);
    EACH_4(n, { store(x + i, mul(load(x + i), f)); }, , x[i] *= factor);
}

// Add a row to every row, as a bias.
void EXPORT(add_row)(f32 *x, const f32 *row, int rows, int cols) {
    for (int r = 0; r < rows; r++) add_to(x + (long)r * cols, row, cols);
}

// Add all rows to one.
void EXPORT(add_column_sums)(f32 *total, const f32 *x, int rows, int cols) {
    for (int r = 0; r < rows; r++) add_to(total, x + (long)r * cols, cols);
}

// ---------------------------------------------------------------------------------------------- norms

static f32 mean_of_products(const f32 *a, const f32 *b, int n) {
    v4 sum = splat(0);
    f32 rest = 0;
    EACH_4(n, { sum = add(sum, mul(load(a + i), load(b + i))); }, , rest += a[i] * b[i]);
    return (lanes_sum(sum) + rest) / n;
}

static f32 mean_of(const f32 *a, int n) {
    v4 sum = splat(0);
    f32 rest = 0;
    EACH_4(n, { sum = add(sum, load(a + i)); }, , rest += a[i]);
    return (lanes_sum(sum) + rest) / n;
}

// y = unscaled g + b, unscaled = centered x / root mean square; `bias` may be null.
void EXPORT(normalize)(f32 *y, f32 *unscaled, f32 *inverse, const f32 *x, const f32 *gain, const f32 *bias, int rows,
                       int cols, int is_layer, f32 eps) {
    for (int r = 0; r < rows; r++, x += cols, y += cols, unscaled += cols) {
        f32 mean = is_layer ? mean_of(x, cols) : 0;
        v4 m = splat(mean);
        EACH_4(cols, { store(unscaled + i, sub(load(x + i), m)); }, , unscaled[i] = x[i] - mean);
        inverse[r] = 1 / square_root(mean_of_products(unscaled, unscaled, cols) + eps);
        scale_by(unscaled, inverse[r], cols);
        EACH_4(cols, { store(y + i, mul(load(unscaled + i), load(gain + i))); }, , y[i] = unscaled[i] * gain[i]);
        if (bias) add_to(y, bias, cols);
    }
}

// dx from dy, in place. Gradients of gain and bias are added where their pointers are not null.
void EXPORT(normalize_back)(f32 *dy, const f32 *unscaled, const f32 *inverse, const f32 *gain, f32 *d_gain, f32 *d_bias,
                            int rows, int cols, int is_layer) {
    for (int r = 0; r < rows; r++, dy += cols, unscaled += cols) {
        if (d_gain) {
            EACH_4(cols, { store(d_gain + i, add(load(d_gain + i), mul(load(dy + i), load(unscaled + i)))); }, ,
                   d_gain[i] += dy[i] * unscaled[i]);
        }
        if (d_bias) add_to(d_bias, dy, cols);
        EACH_4(cols, { store(dy + i, mul(load(dy + i), load(gain + i))); }, , dy[i] *= gain[i]);
        f32 share = mean_of_products(dy, unscaled, cols);
        v4 s = splat(share);
        EACH_4(cols, { store(dy + i, sub(load(dy + i), mul(load(unscaled + i), s))); }, , dy[i] -= unscaled[i] * share);
        if (is_layer) {
            f32 mean = mean_of(dy, cols);
            v4 m = splat(mean);
            EACH_4(cols, { store(dy + i, sub(load(dy + i), m)); }, , dy[i] -= mean);
        }
        scale_by(dy, inverse[r], cols);
    }
}

// ---------------------------------------------------------------------------------------------- attention

// Rotate every head of every row by halves; `table` has cosines beside sines, 2 head_dim wide. Backward is the transpose.
void EXPORT(rotate)(f32 *x, const f32 *table, int rows, int width, int head_dim, int is_backward) {
    int half = head_dim / 2;
    for (int r = 0; r < rows; r++, table += 2 * head_dim)
        for (int first = 0; first < width; first += head_dim) {
            f32 *left = x + (long)r * width + first, *right = left + half;
            const f32 *c = table, *s = table + head_dim;
            for (int i = 0; i < half; i++) {
                f32 l = left[i], t = right[i];
                if (is_backward) {
                    left[i] = l * c[i] + t * s[half + i];
                    right[i] = t * c[half + i] - l * s[i];
                } else {
                    left[i] = l * c[i] - t * s[i];
                    right[i] = t * c[half + i] + l * s[half + i];
                }
            }
        }
}

// Softmax over the keys that each row sees: key j of `first_key` on is seen by row i of `first_row` on if j <= i,
// j > i - window (0: no window) and mask[j] is not 0 (null: no mask). What is not seen becomes 0.
void EXPORT(softmax)(f32 *scores, const f32 *mask, int rows, int keys, int first_row, int first_key, int window) {
    for (int r = 0; r < rows; r++, scores += keys) {
        int row = first_row + r, end = least(keys, row - first_key + 1), begin = 0;
        if (window && row - window + 1 > first_key) begin = least(keys, row - window + 1 - first_key);
        if (end < 0) end = 0;
        f32 top = -__builtin_inff();
        int is_broken = 0;
        for (int j = begin; j < end; j++) {
            if (mask && mask[first_key + j] == 0) scores[j] = -__builtin_inff();
            if (scores[j] != scores[j]) is_broken = 1;
            if (scores[j] > top) top = scores[j];
        }
        for (int j = 0; j < begin; j++) scores[j] = 0;
        for (int j = end; j < keys; j++) scores[j] = 0;
        if (is_broken || (top == __builtin_inff())) {
            for (int j = begin; j < end; j++) scores[j] = __builtin_nanf("");
            continue;
        }
        if (top == -__builtin_inff()) {
            for (int j = begin; j < end; j++) scores[j] = 0;
            continue;
        }
        v4 t = splat(top), sum = splat(0), floor = splat(-80);
        f32 total = 0;
        int n = end - begin;
        f32 *x = scores + begin;
        EACH_4(n, {
            v4 z = sub(load(x + i), t);
            v4 e = wasm_v128_and(exponential(z), wasm_f32x4_ge(z, floor));  // e^-80 is nothing beside 1
            sum = add(sum, e);
            store(x + i, e);
        }, f32 z = x[i] - top, (x[i] = z >= -80 ? exponential_1(z) : 0, total += x[i]));
        scale_by(x, 1 / (total + lanes_sum(sum)), n);
    }
}

// The gradient of scores, in place of that of probabilities: p (d - shares[row]).
void EXPORT(softmax_back)(f32 *d, const f32 *p, const f32 *shares, int rows, int keys) {
    for (int r = 0; r < rows; r++, d += keys, p += keys) {
        v4 s = splat(shares[r]);
        EACH_4(keys, { store(d + i, mul(load(p + i), sub(load(d + i), s))); }, , d[i] = p[i] * (d[i] - shares[r]));
    }
}

// The inner product of each row of a with that of b.
void EXPORT(row_products)(f32 *out, const f32 *a, const f32 *b, int rows, int cols, int stride) {
    for (int r = 0; r < rows; r++, a += stride, b += stride) out[r] = mean_of_products(a, b, cols) * cols;
}

// ---------------------------------------------------------------------------------------------- MLP

enum { SILU, GELU, GELU_TANH, RELU };

static const f32 TANH_SCALE = 1.5957691216057308f, TANH_CUBE = 0.044715f;

// Every activation is x s(x); this is s.
static inline v4 gain_of(v4 x, int activation) {
    switch (activation) {
    case SILU: return sigmoid(x);
    case GELU: return mul(add(error_function(mul(x, splat(0.70710678f))), splat(1)), splat(0.5f));
    case GELU_TANH:
        return sigmoid(mul(mul(add(mul(mul(x, x), splat(TANH_CUBE)), splat(1)), x), splat(TANH_SCALE)));
    default: return wasm_v128_and(wasm_f32x4_gt(x, splat(0)), splat(1));
    }
}

// The derivative of x s(x).
static inline v4 slope_of(v4 x, v4 gain, int activation) {
    v4 rest = sub(splat(1), gain);
    switch (activation) {
    case SILU: return add(mul(mul(x, gain), rest), gain);
    case GELU:
        return add(mul(mul(exponential(mul(mul(x, x), splat(-0.5f))), x), splat(0.3989422804f)), gain);
    case GELU_TANH: {
        v4 s = mul(mul(add(mul(mul(x, x), splat(3 * TANH_CUBE)), splat(1)), x), splat(TANH_SCALE));
        return add(mul(mul(s, gain), rest), gain);
    }
    default: return gain;
    }
}

static inline v4 partial(const f32 *from, int n) {
    f32 four[4] __attribute__((aligned(16))) = {0, 0, 0, 0};
    for (int i = 0; i < n; i++) four[i] = from[i];
    return load(four);
}

static inline void put_partial(f32 *to, v4 x, int n) {
    f32 four[4] __attribute__((aligned(16)));
    store(four, x);
    for (int i = 0; i < n; i++) to[i] = four[i];
}

// x := act(x), times `up` unless that is null.
void EXPORT(activate)(f32 *x, const f32 *up, int n, int activation) {
    for (int i = 0; i < n; i += 4) {
        int here = least(4, n - i);
        v4 z = here == 4 ? load(x + i) : partial(x + i, here), y = mul(z, gain_of(z, activation));
        if (up) y = mul(y, here == 4 ? load(up + i) : partial(up + i, here));
        if (here == 4) store(x + i, y);
        else put_partial(x + i, y, here);
    }
}

// x becomes the gradient of the activation's input, `d` that of `up`, `inner` what entered `down`; `up` may be null.
void EXPORT(activate_back)(f32 *x, const f32 *up, f32 *d, f32 *inner, int n, int activation) {
    for (int i = 0; i < n; i += 4) {
        int here = least(4, n - i), is_whole = here == 4;
        v4 z = is_whole ? load(x + i) : partial(x + i, here), g = is_whole ? load(d + i) : partial(d + i, here);
        v4 gain = gain_of(z, activation), y = mul(z, gain), dz = mul(slope_of(z, gain, activation), g), du = splat(0);
        if (up) {
            v4 u = is_whole ? load(up + i) : partial(up + i, here);
            du = mul(g, y), dz = mul(dz, u), y = mul(y, u);
        }
        if (is_whole) {
            store(x + i, dz), store(inner + i, y);
            if (up) store(d + i, du);
        } else {
            put_partial(x + i, dz, here), put_partial(inner + i, y, here);
            if (up) put_partial(d + i, du, here);
        }
    }
}

// ---------------------------------------------------------------------------------------------- head

// rows x 2: logsumexp over these words, and the logit of the target, 0 if it is not among them.
void EXPORT(head_losses)(f32 *out, f32 *logits, const f32 *targets, int rows, int words, f32 first) {
    for (int r = 0; r < rows; r++, logits += words, out += 2) {
        f32 target = targets[r] - first, top = -__builtin_inff();
        out[1] = target >= 0 && target < words ? logits[(int)target] : 0;
        for (int i = 0; i < words; i++) top = logits[i] > top || logits[i] != logits[i] ? logits[i] : top;
        v4 t = splat(top), sum = splat(0);
        f32 rest = 0;
        EACH_4(words, { sum = add(sum, exponential(sub(load(logits + i), t))); }, ,
               rest += exponential_1(logits[i] - top));
        out[0] = (f32)(env_log((double)(lanes_sum(sum) + rest)) + (double)top);
    }
}

// dlogits in place of logits: (exp(z - L) - (1 for the target)) d, with L and d of each row in `dy`.
void EXPORT(head_gradients)(f32 *logits, const f32 *targets, const f32 *dy, int rows, int words, f32 first) {
    for (int r = 0; r < rows; r++, logits += words, dy += 2) {
        f32 target = targets[r] - first;
        v4 total = splat(dy[0]), d = splat(dy[1]);
        EACH_4(words, { store(logits + i, exponential(sub(load(logits + i), total))); }, ,
               logits[i] = exponential_1(logits[i] - dy[0]));
        if (target >= 0 && target < words) logits[(int)target] -= 1;
        EACH_4(words, { store(logits + i, mul(load(logits + i), d)); }, , logits[i] *= dy[1]);
    }
}

// ---------------------------------------------------------------------------------------------- optimizer

double EXPORT(square_sum)(const f32 *x, int n) {
    double total = 0;
    for (int i = 0; i < n; i++) total += (double)x[i] * (double)x[i];
    return total;
}

void EXPORT(sgd)(f32 *weight, const f32 *gradient, f32 *mean, int n, f32 scale, f32 rate, f32 momentum, f32 dampening,
                 f32 weight_decay, int is_nesterov, int is_first) {
    f32 kept = 1 - dampening;
    for (int i = 0; i < n; i++) {
        f32 g = gradient[i] * scale + weight_decay * weight[i];
        if (mean) {
            mean[i] = is_first ? g : momentum * mean[i] + kept * g;
            g = is_nesterov ? g + momentum * mean[i] : mean[i];
        }
        weight[i] -= rate * g;
    }
}

// `decay` is 1 - rate weight_decay if decoupled, else 1; `step_size` and `root` have the corrections of both means.
void EXPORT(adam)(f32 *weight, const f32 *gradient, f32 *mean, f32 *square, int n, f32 scale, f32 beta1, f32 beta2,
                  f32 eps, f32 weight_decay, f32 decay, f32 step_size, f32 root) {
    f32 rest1 = 1 - beta1, rest2 = 1 - beta2;
    for (int i = 0; i < n; i++) {
        f32 g = gradient[i] * scale + weight_decay * weight[i];
        mean[i] += rest1 * (g - mean[i]);
        square[i] = beta2 * square[i] + rest2 * g * g;
        weight[i] = weight[i] * decay - step_size * (mean[i] / (square_root(square[i]) / root + eps));
    }
}

// ---------------------------------------------------------------------------------------------- number formats

static inline f32 as_float(uint32_t bits) { f32 x; __builtin_memcpy(&x, &bits, 4); return x; }
static inline uint32_t as_bits(f32 x) { uint32_t bits; __builtin_memcpy(&bits, &x, 4); return bits; }

void EXPORT(decode_bf16)(f32 *to, const uint16_t *from, int n) {
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        v4 halves = wasm_v128_load(from + i);
        store(to + i, wasm_i32x4_shl(wasm_u32x4_extend_low_u16x8(halves), 16));
        store(to + i + 4, wasm_i32x4_shl(wasm_u32x4_extend_high_u16x8(halves), 16));
    }
    for (; i < n; i++) to[i] = as_float((uint32_t)from[i] << 16);
}

void EXPORT(encode_bf16)(uint16_t *to, const f32 *from, int n) {
    for (int i = 0; i < n; i++) {
        uint32_t x = as_bits(from[i]);
        to[i] = from[i] != from[i] ? 0x7FC0 : (uint16_t)((x + 0x7FFF + ((x >> 16) & 1)) >> 16);
    }
}

void EXPORT(decode_fp16)(f32 *to, const uint16_t *from, int n) {
    for (int i = 0; i < n; i++) {
        uint32_t half = from[i], sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, rest = half & 0x3FF;
        if (exponent == 31) to[i] = as_float(sign | 0x7F800000u | (rest << 13));
        else if (exponent) to[i] = as_float(sign | ((exponent + 112) << 23) | (rest << 13));
        else to[i] = as_float(sign | as_bits((f32)rest * 5.9604644775390625e-8f));  // 2^-24
    }
}

void EXPORT(encode_fp16)(uint16_t *to, const f32 *from, int n) {
    for (int i = 0; i < n; i++) {
        uint32_t bits = as_bits(from[i]), sign = (bits >> 16) & 0x8000u, size = bits & 0x7FFFFFFFu, half;
        if (size > 0x7F800000u) half = 0x7E00;
        else if (size >= 0x477FF000u) half = 0x7C00;  // 65520 and more round to infinity
        else if (size >= 0x38800000u) half = (size - 0x38000000u + 0xFFF + ((size >> 13) & 1)) >> 13;
        else half = as_bits(as_float(size) + 0.5f) - 0x3F000000u;  // denormals: the sum rounds to multiples of 2^-24
        to[i] = (uint16_t)(sign | half);
    }
}

enum { Q8_BLOCK = 32 };

void EXPORT(decode_q8)(f32 *to, const uint8_t *from, int rows, int cols) {
    int blocks = (cols + Q8_BLOCK - 1) / Q8_BLOCK;
    for (int r = 0; r < rows; r++, to += cols, from += 2 * blocks + cols) {
        const int8_t *bytes = (const int8_t *)(from + 2 * blocks);
        for (int b = 0; b < blocks; b++) {
            f32 scale = as_float(((uint32_t)from[2 * b] | (uint32_t)from[2 * b + 1] << 8) << 16);
            for (int i = b * Q8_BLOCK; i < least(cols, (b + 1) * Q8_BLOCK); i++) to[i] = bytes[i] * scale;
        }
    }
}

void EXPORT(encode_q8)(uint8_t *to, const f32 *from, int rows, int cols) {
    int blocks = (cols + Q8_BLOCK - 1) / Q8_BLOCK;
    for (int r = 0; r < rows; r++, from += cols, to += 2 * blocks + cols) {
        int8_t *bytes = (int8_t *)(to + 2 * blocks);
        for (int b = 0; b < blocks; b++) {
            int first = b * Q8_BLOCK, last = least(cols, first + Q8_BLOCK);
            uint32_t peak = 0;
            for (int i = first; i < last; i++) {
                uint32_t size = as_bits(from[i]) & 0x7FFFFFFFu;
                if (size > peak) peak = size;
            }
            if (peak >= 0x7F800000u) {
                to[2 * b] = 0xC0, to[2 * b + 1] = 0x7F;
                for (int i = first; i < last; i++) bytes[i] = 0;
                continue;
            }
            f32 scale = as_float(peak) / 127.0f;
            if (scale < 1.1754943508222875e-38f) scale = 1.1754943508222875e-38f;
            uint32_t half = (as_bits(scale) + 0xFFFF) >> 16;
            to[2 * b] = half & 0xFF, to[2 * b + 1] = half >> 8;
            f32 inverse = 1 / as_float(half << 16);
            for (int i = first; i < last; i++) bytes[i] = (int8_t)__builtin_rintf(from[i] * inverse);
        }
    }
}
