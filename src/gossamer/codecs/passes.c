/* What the codecs do to every element, in one pass over memory; bit for bit the numbers of the plain form in Python.

   No sum of floats is taken here, as its order would decide the last bit. Magnitudes are compared as whole numbers: the bits of
   floats without their sign are ordered as the floats, with NaN last. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(ONE_TARGET)
#define PASS __attribute__((target_clones("arch=x86-64-v4", "avx2", "default"))) void
#else
#define PASS void
#endif
#define INLINE static inline __attribute__((always_inline))

enum { MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000, NOT_A_NUMBER = 0x7fc00000, LARGEST_BF16 = 0x7f7f0000, LEAST = 121 << 23 };

INLINE int32_t bits_of(float value) { int32_t bits; memcpy(&bits, &value, 4); return bits; }
INLINE float float_of(int32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int32_t largest(const float *x, int64_t n) {
  int32_t top = 0;
  for (int64_t i = 0; i < n; i++) {
    int32_t bits = bits_of(x[i]) & MAGNITUDE;
    top = bits > top ? bits : top;
  }
  return top;
}

/* To the nearest whole number, ties to even, of a magnitude far below 2^22: the sum has no bits for a fraction. */
INLINE int32_t nearest(float value) { return bits_of(value + 12582912.0f) - 0x4b400000; }

/* The generator of torch on a CPU, which is MT19937, and its words as `random_` of 64-bit numbers draws them: the upper half first. */
typedef struct { uint32_t state[624]; int32_t draws[624]; int64_t used; } Twister;

INLINE void seed(Twister *t, int64_t key) {
  t->state[0] = (uint32_t)key;
  for (uint32_t j = 1; j < 624; j++) t->state[j] = 1812433253u * (t->state[j - 1] ^ t->state[j - 1] >> 30) + j;
  t->used = 624;
}

INLINE uint32_t twisted(uint32_t u, uint32_t v) { return ((u & 0x80000000u) | (v & 0x7fffffffu)) >> 1 ^ (-(v & 1u) & 0x9908b0dfu); }

INLINE void refill(Twister *t) {
  uint32_t *s = t->state;
  for (int j = 0; j < 227; j++) s[j] = s[j + 397] ^ twisted(s[j], s[j + 1]);
  for (int j = 227; j < 623; j++) s[j] = s[j - 227] ^ twisted(s[j], s[j + 1]);
  s[623] = s[396] ^ twisted(s[623], s[0]);
  for (int j = 0; j < 624; j++) {
    uint32_t y = s[j];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    t->draws[j] = (int32_t)((y ^ y >> 18) & 0x7fffff);
  }
  for (int j = 0; j < 624; j += 2) {
    int32_t first = t->draws[j];
    t->draws[j] = t->draws[j + 1], t->draws[j + 1] = first;
  }
  t->used = 0;
}

/* Whole numbers below 2^23, for n elements and to an even number of them. */
INLINE void draw(Twister *t, int64_t n, int32_t *draws) {
  for (n += n & 1; n;) {
    if (t->used == 624) refill(t);
    int64_t some = least(n, 624 - t->used);
    memcpy(draws, t->draws + t->used, 4 * some);
    t->used += some, draws += some, n -= some;
  }
}

/* The whole number below, after a share of one is added; at most `levels`, which rounding may exceed. */
INLINE int32_t drawn(float steps, int32_t share, int32_t levels) {
  float sum = steps + (float)share * 0x1p-23f;
  int32_t whole = (int32_t)sum;
  whole -= (float)whole > sum;
  return whole < levels ? whole : levels;
}

#define BYTES(name, draws)                                                                                       \
  PASS name(const float *x, int64_t n, int64_t block, uint8_t *codes, float *scales, int64_t key) {              \
    Twister twister;                                                                                             \
    int32_t shares[1 << 16];                                                                                     \
    if (draws) seed(&twister, key);                                                                              \
    for (int64_t start = 0; start < n; start += block) {                                                         \
      int64_t here = least(block, n - start);                                                                    \
      int32_t top = largest(x + start, here);                                                                    \
      float scale = float_of(top < INFINITE ? top : NOT_A_NUMBER), divisor = top ? scale : 1.0f;                 \
      *scales++ = scale;                                                                                         \
      if (draws) draw(&twister, here, shares);                                                                   \
      for (int64_t i = 0; top < INFINITE && i < here; i++) {                                                     \
        float steps = x[start + i] / divisor * 127.0f;                                                           \
        codes[start + i] = (uint8_t)(draws ? drawn(steps, shares[i], 127) : nearest(steps));                     \
      }                                                                                                          \
      if (top >= INFINITE) memset(codes + start, 0, here);                                                       \
    }                                                                                                            \
  }

BYTES(encode_int8, 0)
BYTES(encode_int8_drawn, 1)

INLINE uint8_t linear(float ratio, int32_t share) { (void)share; return (uint8_t)(nearest(ratio * 7.0f) + 8); }
INLINE uint8_t linear_drawn(float ratio, int32_t share) { return (uint8_t)(drawn(ratio * 7.0f, share, 7) + 8); }

INLINE uint8_t octave_drawn(float ratio, int32_t share) {
  int32_t bits = bits_of(ratio) & MAGNITUDE, small = (bits - LEAST) >> 31;
  bits = bits_of(float_of(bits) + float_of(small & LEAST));
  bits = ((int32_t)((uint32_t)bits + (uint32_t)share) >> 23) + small - ((LEAST >> 23) - 1);
  return (uint8_t)(bits | (bits_of(ratio) >> 28 & 8));
}
INLINE uint8_t octave(float ratio, int32_t share) { (void)share; return octave_drawn(ratio, 1 << 22); }

/* The scale of a block, rounded up to bf16. */
INLINE float rounded_up(const float *x, int64_t n, uint16_t *scale) {
  int32_t top = largest(x, n);
  *scale = top <= LARGEST_BF16 ? (uint16_t)((top + 0xffff) >> 16) : NOT_A_NUMBER >> 16;
  return float_of((int32_t)((uint32_t)*scale << 16));
}

/* Codes of NaN have bits above their four, which the plain form packs in the same way. */
#define NIBBLES(name, code, of_nan, draws)                                                                      \
  PASS name(const float *x, int64_t n, int64_t block, uint8_t *codes, uint16_t *scales, int64_t key) {           \
    uint8_t own[1 << 16];                                                                                        \
    Twister twister;                                                                                             \
    int32_t shares[1 << 16];                                                                                     \
    if (draws) seed(&twister, key);                                                                              \
    for (int64_t start = 0; start < n; start += block) {                                                         \
      int64_t here = least(block, n - start);                                                                    \
      float scale = rounded_up(x + start, here, scales++), divisor = scale == 0.0f ? 1.0f : scale;               \
      if (draws) draw(&twister, here, shares);                                                                   \
      if (of_nan && scale != scale)                                                                              \
        memset(own, 0, here + 1);                                                                                \
      else {                                                                                                     \
        for (int64_t i = 0; i < here; i++) own[i] = code(x[start + i] / divisor, draws ? shares[i] : 0);         \
        if (here & 1) own[here] = code(0.0f / divisor, draws ? shares[here] : 0);                                \
      }                                                                                                          \
      for (int64_t i = 0; i < (here + 1) / 2; i++)                                                               \
        codes[start / 2 + i] = (uint8_t)(own[2 * i] | own[2 * i] >> 4 | own[2 * i + 1] << 4);                    \
    }                                                                                                            \
  }

NIBBLES(encode_int4, linear, 1, 0)
NIBBLES(encode_int4_drawn, linear_drawn, 1, 1)
NIBBLES(encode_fp4, octave, 0, 0)
NIBBLES(encode_fp4_drawn, octave_drawn, 0, 1)

/* Whether each element is at least zero once divided by its scale, eight to a byte. */
PASS encode_sign(const float *x, int64_t n, int64_t block, uint8_t *codes, const uint16_t *scales, int64_t key) {
  (void)key;
  uint8_t own[1 << 16];
  for (int64_t start = 0; start < n; start += block) {
    int64_t here = least(block, n - start), bytes = (here + 7) / 8;
    float scale = float_of((int32_t)((uint32_t)*scales++ << 16)), divisor = scale == 0.0f ? 1.0f : scale;
    for (int64_t i = 0; i < here; i++) own[i] = x[start + i] / divisor >= 0.0f;
    memset(own + here, scale == scale, 8 * bytes - here);
    for (int64_t i = 0; i < bytes; i++) {
      uint64_t word;  /* eight codes of a byte each, lowest first; the product gathers them in its highest byte */
      memcpy(&word, own + 8 * i, 8);
      codes[start / 8 + i] = (uint8_t)(word * 0x0102040810204080 >> 56);
    }
  }
}

PASS decode_int8(float *x, int64_t n, int64_t block, const int8_t *codes, const float *scales) {
  for (int64_t start = 0; start < n; start += block, scales++)
    for (int64_t i = start; i < least(start + block, n); i++) x[i] = (float)codes[i] / 127.0f * *scales;
}

/* Codes of 4 bits or 1 by a table of the levels. */
PASS decode_levels(float *x, int64_t n, int64_t block, const uint8_t *codes, const uint16_t *scales, const float *levels, int64_t bits) {
  for (int64_t start = 0; start < n; start += block) {
    float scale = float_of((int32_t)((uint32_t)*scales++ << 16)), own[16];
    for (int c = 0; c < 1 << bits; c++) own[c] = levels[c] * scale;
    int64_t stop = least(start + block, n);
    if (bits == 4) {
      for (int64_t i = start; i + 1 < stop; i += 2) {
        x[i] = own[codes[i / 2] & 15];
        x[i + 1] = own[codes[i / 2] >> 4];
      }
      if (stop & 1) x[stop - 1] = own[codes[stop / 2] & 15];
    } else {
      int32_t low = bits_of(own[0]), flip = low ^ bits_of(own[1]);
      for (int64_t i = start; i + 8 <= stop; i += 8)
        for (int j = 0; j < 8; j++) x[i + j] = float_of(low ^ (flip & -(codes[i / 8] >> j & 1)));
      for (int64_t i = stop & ~7; i < stop; i++) x[i] = own[codes[i / 8] >> (i & 7) & 1];
    }
  }
}

/* Of every row of n <= 4096 elements the k with the largest magnitudes, of equal ones the first: places, ascending, and values. */
PASS select_largest(const float *x, int64_t rows, int64_t n, int64_t k, int16_t *places, float *values) {
  int32_t bits[4096];
  for (; rows--; x += n) {
    for (int64_t i = 0; i < n; i++) bits[i] = bits_of(x[i]) & MAGNITUDE;
    int32_t border = 0;  /* the largest of which at least k are as large */
    int32_t above = 0;
    for (int32_t bit = 1 << 30; bit; bit >>= 1) {
      int32_t next = border | bit, count = 0;
      for (int64_t i = 0; i < n; i++) count += bits[i] >= next;
      if (count >= k) border = next;
      if (count == k) break;
    }
    for (int64_t i = 0; i < n; i++) above += bits[i] > border;
    int64_t ties = k - above, i = 0;
    for (int64_t first = 0; first < n; first += 16) {
      int any = 0;
      int64_t stop = least(first + 16, n);
      for (i = first; i < stop; i++) any |= bits[i] >= border;
      for (i = first; any && i < stop; i++)
        if (bits[i] > border || (bits[i] == border && ties-- > 0)) {
          *places++ = (int16_t)i;
          *values++ = x[i];
        }
    }
  }
}
