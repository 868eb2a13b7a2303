/* Chunks of a Kineto (Chrome) trace -> event columns.
 *
 * Reads "[{...}, {...}]" and either understands every byte of it, or answers ODD and has changed nothing that the
 * caller can see; the caller then takes the Python path for that chunk. So all that is unusual (other types, escapes
 * in keys, numbers with exponents, negative durations, lone surrogates, doubled keys, invalid JSON) is decided in one
 * place, in Python, and the two paths cannot differ. What is accepted here is a subset of RFC 8259 with valid UTF-8.
 *
 * The input is hostile: every read is bounded by `end`, nesting by MAX_DEPTH, memory by the size of the input.
 * Plain C99; SSE2 where the compiler has it.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define MAX_DEPTH 32
#define MAX_CATEGORIES 64
#define ABI 4

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif
#if defined(__GNUC__)
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#else
#define LIKELY(x) (x)
#define UNLIKELY(x) (x)
#endif

typedef const uint8_t *Text;

/* Where the columns go; all arrays have room for `rows` (asides: 3 * `asides`) entries. */
typedef struct {
    int8_t *cat;
    int32_t *name;
    int64_t *start, *end, *pid, *tid, *device, *stream, *corr, *sequence;
    int64_t *aside; /* (row, from, to): NCCL arguments of a row; row -1: a metadata event, row -2: an arrow's end */
    int64_t rows, asides;
} Rows;

typedef struct {
    int64_t seen, rows, asides, names;
} Counts;

typedef struct {
    /* categories: lower-case text -> code */
    int categories;
    uint8_t cat_text[MAX_CATEGORIES][32];
    int cat_len[MAX_CATEGORIES];
    int8_t cat_code[MAX_CATEGORIES];
    /* names: distinct raw texts; offsets[i]..offsets[i+1] in arena */
    uint8_t *arena;
    int64_t arena_size, *offsets, offsets_size, names;
    uint64_t *hashes, seed;
    int32_t *table;
    int64_t table_size;
} Scanner;

/* --- text ------------------------------------------------------------------------------------------------- */

static inline Text skip_space(Text p, Text end) {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\t' || *p == '\r')) p++;
    return p;
}

/* Length of the valid UTF-8 sequence at p (first byte >= 0x80), 0 when it is none. */
static int utf8_length(Text p, Text end) {
    uint8_t a = p[0];
    int n = a >= 0xF0 ? 4 : a >= 0xE0 ? 3 : 2;
    if (a < 0xC2 || a > 0xF4 || end - p < n) return 0;
    for (int i = 1; i < n; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    if (a == 0xE0 && p[1] < 0xA0) return 0;
    if (a == 0xED && p[1] > 0x9F) return 0;
    if (a == 0xF0 && p[1] < 0x90) return 0;
    if (a == 0xF4 && p[1] > 0x8F) return 0;
    return n;
}

/* Length of the valid escape at p (a backslash), 0 when it is none or names half a surrogate pair. */
static int escape_length(Text p, Text end) {
    if (end - p < 2) return 0;
    switch (p[1]) {
    case '"': case '\\': case '/': case 'b': case 'f': case 'n': case 'r': case 't':
        return 2;
    case 'u':
        break;
    default:
        return 0;
    }
    if (end - p < 6) return 0;
    unsigned value = 0;
    for (int i = 2; i < 6; i++) {
        uint8_t c = p[i], low = c | 0x20;
        if (c >= '0' && c <= '9') value = value * 16 + (c - '0');
        else if (low >= 'a' && low <= 'f') value = value * 16 + (low - 'a' + 10);
        else return 0;
    }
    return value >= 0xD800 && value <= 0xDFFF ? 0 : 6;
}

/* The closing quote of the string whose first byte is p; NULL when it is not sound. *plain: only ASCII, no escape. */
static inline Text string_end(Text p, Text end, int *plain) {
    *plain = 1;
    for (;;) {
#if defined(__SSE2__)
        const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\'), space = _mm_set1_epi8(0x20);
        int mask = 0;
        while (end - p >= 16) {
            __m128i v = _mm_loadu_si128((const __m128i *)p);
            __m128i hit = _mm_or_si128(_mm_cmpeq_epi8(v, quote), _mm_cmpeq_epi8(v, slash));
            hit = _mm_or_si128(hit, _mm_cmplt_epi8(v, space)); /* signed: control characters, and >= 0x80 */
            mask = _mm_movemask_epi8(hit);
            if (mask) break;
            p += 16;
        }
        if (mask) p += __builtin_ctz((unsigned)mask);
        else
#endif
            while (p < end && *p != '"' && *p != '\\' && *p >= 0x20 && *p < 0x80) p++;
        if (UNLIKELY(p >= end)) return NULL;
        if (LIKELY(*p == '"')) return p;
        int n = *p == '\\' ? escape_length(p, end) : *p >= 0x80 ? utf8_length(p, end) : 0;
        if (n == 0) return NULL;
        *plain = 0;
        p += n;
    }
}

static inline int is_digit(uint8_t c) { return (uint8_t)(c - '0') < 10; }

/* A JSON number that any reader accepts: neither a long one nor one with a large exponent. After it, or NULL. */
static inline Text number_end(Text p, Text end) {
    Text from = p;
    if (p < end && *p == '-') p++;
    if (p >= end || !is_digit(*p)) return NULL;
    if (*p == '0') {
        p++;
        if (p < end && is_digit(*p)) return NULL;
    } else
        while (p < end && is_digit(*p)) p++;
    if (p < end && *p == '.') {
        p++;
        if (p >= end || !is_digit(*p)) return NULL;
        while (p < end && is_digit(*p)) p++;
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
        p++;
        if (p < end && (*p == '+' || *p == '-')) p++;
        Text digits = p;
        while (p < end && is_digit(*p)) p++;
        if (p == digits || p - digits > 2) return NULL;
    }
    return p - from > 25 ? NULL : p;
}

static inline Text literal_end(Text p, Text end, const char *word, int length) {
    return end - p >= length && memcmp(p, word, (size_t)length) == 0 ? p + length : NULL;
}

/* After the value at p, whatever it is; NULL when it is not sound. */
static Text value_end(Text p, Text end, int depth) {
    int plain;
    if (p >= end) return NULL;
    switch (*p) {
    case '"':
        p = string_end(p + 1, end, &plain);
        return p ? p + 1 : NULL;
    case 't':
        return literal_end(p, end, "true", 4);
    case 'f':
        return literal_end(p, end, "false", 5);
    case 'n':
        return literal_end(p, end, "null", 4);
    case '{':
    case '[':
        break;
    default:
        return number_end(p, end);
    }
    if (depth >= MAX_DEPTH) return NULL;
    const int object = *p == '{';
    const uint8_t close = object ? '}' : ']';
    p = skip_space(p + 1, end);
    if (p < end && *p == close) return p + 1;
    for (;;) {
        if (object) {
            if (p >= end || *p != '"' || !(p = string_end(p + 1, end, &plain))) return NULL;
            p = skip_space(p + 1, end);
            if (p >= end || *p != ':') return NULL;
            p = skip_space(p + 1, end);
        }
        if (!(p = value_end(p, end, depth + 1))) return NULL;
        p = skip_space(p, end);
        if (p >= end) return NULL;
        if (*p == close) return p + 1;
        if (*p != ',') return NULL;
        p = skip_space(p + 1, end);
    }
}

/* --- numbers ---------------------------------------------------------------------------------------------- */

/* A whole number of at most 18 digits. After it, or NULL. */
static inline Text whole_number(Text p, Text end, int64_t *out) {
    int negative = p < end && *p == '-';
    p += negative;
    Text digits = p;
    int64_t value = 0;
    while (p < end && is_digit(*p) && p - digits < 18) value = value * 10 + (*p++ - '0');
    if (p == digits || (*digits == '0' && p - digits > 1)) return NULL;
    if (p < end && (*p == '.' || *p == 'e' || *p == 'E' || is_digit(*p))) return NULL;
    *out = negative ? -value : value;
    return p;
}

/* The number that a string holds: "7" or "0x1f"; 0 when it is written in any other way. */
static int number_in_text(Text p, Text end, int64_t *out) {
    if (end - p > 2 && p[0] == '0' && (p[1] == 'x' || p[1] == 'X')) {
        int64_t value = 0;
        if (end - p > 17) return 0;
        for (p += 2; p < end; p++) {
            uint8_t low = *p | 0x20;
            if (is_digit(*p)) value = value * 16 + (*p - '0');
            else if (low >= 'a' && low <= 'f') value = value * 16 + (low - 'a' + 10);
            else return 0;
        }
        *out = value;
        return 1;
    }
    return p < end && whole_number(p, end, out) == end;
}

/* A thread, process or stream: a whole number, or a string that holds one. After it, or NULL. */
static inline Text thread_number(Text p, Text end, int64_t *out) {
    int plain;
    if (p < end && *p == '"') {
        Text close = string_end(p + 1, end, &plain);
        return close && plain && number_in_text(p + 1, close, out) ? close + 1 : NULL;
    }
    return whole_number(p, end, out);
}

typedef struct {
    int64_t ns;
    int64_t whole; /* microseconds, without sign */
    int decimals;  /* that matter: without trailing zeros */
} Time;

/* Microseconds -> nanoseconds, rounded as the Python path rounds. After it, or NULL. */
static inline Text microseconds(Text p, Text end, Time *out) {
    static const double power[] = {1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
    int negative = p < end && *p == '-', decimals = 0, used = 0;
    p += negative;
    Text digits = p;
    int64_t whole = 0, fraction = 0, mantissa;
    while (p < end && is_digit(*p) && p - digits < 17) whole = whole * 10 + (*p++ - '0');
    if (p == digits || p - digits > 16 || (*digits == '0' && p - digits > 1) || whole > 2305843009213692) return NULL;
    if (p < end && *p == '.') {
        Text point = ++p;
        while (p < end && is_digit(*p)) {
            if (++decimals > 15) return NULL;
            fraction = fraction * 10 + (*p++ - '0');
        }
        if (p == point) return NULL;
    }
    if (p < end && (*p == 'e' || *p == 'E')) return NULL;
    used = decimals;
    while (used > 0 && fraction % 10 == 0) fraction /= 10, used--;
    if (LIKELY(used <= 3)) {
        int64_t ns = whole * 1000 + (used == 3 ? fraction : used == 2 ? fraction * 10 : used == 1 ? fraction * 100 : 0);
        out->ns = negative ? -ns : ns;
    } else {
        /* More digits than nanoseconds have: as a float64 would say, correctly rounded below 2^53 and 10^22. */
        mantissa = whole;
        for (int i = 0; i < used; i++) {
            if (mantissa > (INT64_C(1) << 53) / 10) return NULL;
            mantissa *= 10;
        }
        mantissa += fraction;
        if (mantissa > INT64_C(1) << 53) return NULL;
        double us = (double)mantissa / power[used];
        if (negative) us = -us;
        double floor_us = floor(us);
        out->ns = (int64_t)floor_us * 1000 + (int64_t)rint((us - floor_us) * 1000);
    }
    out->whole = whole;
    out->decimals = used;
    return p;
}

/* --- names ------------------------------------------------------------------------------------------------ */

static uint64_t hash_of(Text p, int64_t length, uint64_t seed) {
    uint64_t h = seed ^ (uint64_t)length * UINT64_C(0x9E3779B97F4A7C15), word;
    while (length >= 8) {
        memcpy(&word, p, 8);
        h = (h ^ word) * UINT64_C(0xD6E8FEB86659FD93);
        h ^= h >> 32;
        p += 8, length -= 8;
    }
    word = 0;
    memcpy(&word, p, (size_t)length);
    h = (h ^ word) * UINT64_C(0xD6E8FEB86659FD93);
    return h ^ h >> 32;
}

static int grow(void **array, int64_t *size, int64_t need, size_t each) {
    if (need <= *size) return 1;
    int64_t more = *size * 2 > need ? *size * 2 : need;
    void *made = realloc(*array, (size_t)more * each);
    if (!made) return 0;
    *array = made;
    *size = more;
    return 1;
}

static void place(Scanner *s, int32_t id) {
    uint64_t mask = (uint64_t)s->table_size - 1, at = s->hashes[id] & mask;
    while (s->table[at] >= 0) at = (at + 1) & mask;
    s->table[at] = id;
}

static int grow_table(Scanner *s) {
    int64_t size = s->table_size * 2;
    int32_t *table = malloc((size_t)size * sizeof *table);
    uint64_t *hashes = table ? realloc(s->hashes, (size_t)size * sizeof *hashes) : NULL;
    if (!hashes) {
        free(table);
        return 0;
    }
    memset(table, 0xFF, (size_t)size * sizeof *table);
    free(s->table);
    s->table = table, s->hashes = hashes, s->table_size = size;
    for (int32_t id = 0; id < s->names; id++) place(s, id);
    return 1;
}

/* The number of this text; a new one when it is new; -1 without memory. */
static int32_t intern(Scanner *s, Text p, int64_t length) {
    uint64_t h = hash_of(p, length, s->seed), mask = (uint64_t)s->table_size - 1;
    for (uint64_t at = h & mask; s->table[at] >= 0; at = (at + 1) & mask) {
        int32_t id = s->table[at];
        int64_t from = s->offsets[id];
        if (s->hashes[id] == h && s->offsets[id + 1] - from == length && !memcmp(s->arena + from, p, (size_t)length))
            return id;
    }
    if (s->names >= INT32_MAX - 1) return -1;
    if (s->names * 2 >= s->table_size && !grow_table(s)) return -1;
    int64_t from = s->offsets[s->names];
    if (!grow((void **)&s->arena, &s->arena_size, from + length + 1, 1)) return -1;
    if (!grow((void **)&s->offsets, &s->offsets_size, s->names + 2, sizeof *s->offsets)) return -1;
    memcpy(s->arena + from, p, (size_t)length);
    s->offsets[s->names + 1] = from + length;
    s->hashes[s->names] = h;
    int32_t id = (int32_t)s->names++;
    place(s, id);
    return id;
}

/* Forget the names from `keep` on: newest first, so that every probe sequence is what it was. */
static void forget(Scanner *s, int64_t keep) {
    while (s->names > keep) {
        int32_t id = (int32_t)--s->names;
        uint64_t mask = (uint64_t)s->table_size - 1, at = s->hashes[id] & mask;
        while (s->table[at] != id) at = (at + 1) & mask;
        s->table[at] = -1;
    }
}

/* --- events ----------------------------------------------------------------------------------------------- */

enum { ID_PID, ID_TID, ID_DEVICE, ID_STREAM, ID_CORR, ID_SEQUENCE, IDS };
enum { PH = 1, CAT = 2, NAME = 4, PID = 8, TID = 16, TS = 32, DUR = 64, ARGS = 128 };
enum { KEPT = 0, NOT_KEPT = -1, UNKNOWN = -2 };

typedef struct {
    int seen; /* keys so far */
    uint8_t ph;
    int cat; /* code, NOT_KEPT, or UNKNOWN as long as no key said it */
    Text name;
    int64_t name_length;
    int64_t id[IDS];
    Time ts, dur;
    Text args, args_end;
    int comm, odd_time, arrow;
} Event;

static inline int same_text(const uint8_t *lower, Text p, int64_t length) {
    for (int64_t i = 0; i < length; i++)
        if ((p[i] >= 'A' && p[i] <= 'Z' ? p[i] | 0x20 : p[i]) != lower[i]) return 0;
    return 1;
}

/* Code of a category, in capitals or not; NOT_KEPT when it has none. */
static int category(const Scanner *s, Text p, int64_t length) {
    for (int i = 0; i < s->categories; i++)
        if (s->cat_len[i] == length && same_text(s->cat_text[i], p, length)) return s->cat_code[i];
    return NOT_KEPT;
}

#define IS(text) (length == (int64_t)sizeof(text) - 1 && !memcmp(key, text, sizeof(text) - 1))

/* Which number an argument is; -1 when it is none of interest. */
static inline int argument(Text key, int64_t length) {
    switch (length) {
    case 6:
        return IS("device") ? ID_DEVICE : IS("stream") ? ID_STREAM : -1;
    case 11:
        return IS("correlation") ? ID_CORR : -1;
    case 15:
        return IS("Sequence number") ? ID_SEQUENCE : -1;
    default:
        return -1;
    }
}

/* The object of arguments at p. After it, or NULL. */
static Text arguments(Text p, Text end, Event *e) {
    unsigned seen = 0;
    int plain;
    p = skip_space(p + 1, end);
    if (p < end && *p == '}') return p + 1;
    for (;;) {
        if (p >= end || *p != '"') return NULL;
        Text key = p + 1, close = string_end(key, end, &plain);
        if (!close || !plain) return NULL;
        int64_t length = close - key;
        p = skip_space(close + 1, end);
        if (p >= end || *p != ':') return NULL;
        p = skip_space(p + 1, end);
        int number = argument(key, length);
        if (number >= 0) {
            if (seen & 1u << number) return NULL;
            seen |= 1u << number;
            p = number == ID_STREAM ? thread_number(p, end, e->id + number) : whole_number(p, end, e->id + number);
        } else {
            if (IS("Collective name") || IS("Process Group Name")) {
                if (p < end && *p != 'n') e->comm = 1;
            }
            p = value_end(p, end, 2);
        }
        if (!p) return NULL;
        p = skip_space(p, end);
        if (p >= end) return NULL;
        if (*p == '}') return p + 1;
        if (*p != ',') return NULL;
        p = skip_space(p + 1, end);
    }
}

/* Whether this category is of arrows from forward to backward. */
static inline int is_arrow(Text key, int64_t length) { return IS("fwdbwd") || IS("forward_backward"); }

/* The value at p of the key `which`. After it, or NULL. */
static inline Text field(const Scanner *s, Text p, Text end, int which, Event *e) {
    int plain;
    Text close;
    switch (which) {
    case PH:
    case CAT:
    case NAME:
        if (p >= end || *p != '"' || !(close = string_end(p + 1, end, &plain))) return NULL;
        if (which == NAME)
            e->name = p + 1, e->name_length = close - p - 1;
        else if (!plain)
            return NULL;
        else if (which == PH)
            e->ph = close - p == 2 ? p[1] : 0;
        else {
            e->cat = category(s, p + 1, close - p - 1);
            e->arrow = is_arrow(p + 1, close - p - 1);
        }
        return close + 1;
    case ARGS:
        if (p < end && *p == 'n') return literal_end(p, end, "null", 4);
        if (p >= end || *p != '{') return NULL;
        if ((e->seen & PH && e->ph != 'X') || e->cat == NOT_KEPT) return value_end(p, end, 1);
        e->args = p;
        return e->args_end = arguments(p, end, e);
    default:
        break;
    }
    /* Numbers, which other events may write as they like. */
    if ((e->seen & PH && e->ph != 'X') || e->cat == NOT_KEPT) return value_end(p, end, 1);
    switch (which) {
    case PID:
    case TID:
        close = thread_number(p, end, e->id + (which == PID ? ID_PID : ID_TID));
        break;
    default:
        close = microseconds(p, end, which == TS ? &e->ts : &e->dur);
        break;
    }
    if (close) return close;
    e->odd_time = 1; /* decided when it is known what kind of event this is */
    return value_end(p, end, 1);
}

static inline int key_of(Text key, int64_t length) {
    switch (length) {
    case 2:
        return key[0] == 'p' && key[1] == 'h' ? PH : key[0] == 't' && key[1] == 's' ? TS : 0;
    case 3:
        return !memcmp(key, "cat", 3) ? CAT : !memcmp(key, "pid", 3) ? PID : !memcmp(key, "tid", 3) ? TID
             : !memcmp(key, "dur", 3) ? DUR : 0;
    case 4:
        return !memcmp(key, "name", 4) ? NAME : !memcmp(key, "args", 4) ? ARGS : 0;
    default:
        return 0;
    }
}

#define FOUR(a, b, c, d) ((uint32_t)(a) | (uint32_t)(b) << 8 | (uint32_t)(c) << 16 | (uint32_t)(d) << 24)

/* The key of an event whose first letter is at p, where it stands as torch writes it: the colon right behind it. After
 * the colon, or NULL for any other key. */
static inline Text usual_key(Text p, Text end, int *which) {
    uint32_t word;
    if (end - p < 8) return NULL;
    memcpy(&word, p, sizeof word);
    if (p[4] == ':') {
        *which = word == FOUR('c', 'a', 't', '"') ? CAT : word == FOUR('p', 'i', 'd', '"') ? PID
               : word == FOUR('t', 'i', 'd', '"') ? TID : word == FOUR('d', 'u', 'r', '"') ? DUR : 0;
        return *which ? p + 5 : NULL;
    }
    if (p[4] == '"' && p[5] == ':') {
        *which = word == FOUR('n', 'a', 'm', 'e') ? NAME : word == FOUR('a', 'r', 'g', 's') ? ARGS : 0;
        return *which ? p + 6 : NULL;
    }
    *which = word == FOUR('t', 's', '"', ':') ? TS : word == FOUR('p', 'h', '"', ':') ? PH : 0;
    return *which ? p + 4 : NULL;
}

/* The event (object) at p. After it, or NULL. */
static Text event_end(const Scanner *s, Text p, Text end, Event *e) {
    int plain;
    p = skip_space(p + 1, end);
    if (p < end && *p == '}') return p + 1;
    for (;;) {
        if (p >= end || *p != '"') return NULL;
        int which;
        Text key = p + 1, value = usual_key(key, end, &which);
        if (UNLIKELY(!value)) {
            Text close = string_end(key, end, &plain);
            if (!close || !plain) return NULL;
            which = key_of(key, close - key);
            value = skip_space(close + 1, end);
            if (value >= end || *value++ != ':') return NULL;
        }
        p = skip_space(value, end);
        if (e->seen & which) return NULL;
        p = which ? field(s, p, end, which, e) : value_end(p, end, 1);
        e->seen |= which;
        if (!p) return NULL;
        p = skip_space(p, end);
        if (p >= end) return NULL;
        if (*p == '}') return p + 1;
        if (*p != ',') return NULL;
        p = skip_space(p + 1, end);
    }
}

static int aside(const Rows *rows, Counts *n, int64_t row, int64_t from, int64_t to) {
    if (n->asides >= rows->asides) return 0;
    int64_t *at = rows->aside + 3 * n->asides++;
    at[0] = row, at[1] = from, at[2] = to;
    return 1;
}

/* A complete event of a known category becomes a row. 0 when it is odd. */
static int keep(Scanner *s, const Event *e, Text text, const Rows *rows, Counts *n) {
    if (e->odd_time || (e->seen & (PID | TID | TS | DUR)) != (PID | TID | TS | DUR)) return 0;
    const int64_t large = INT64_C(1) << 42;
    if (e->dur.whole >= large && e->dur.decimals) return 0;
    if (e->ts.whole >= large && (e->ts.decimals > 3 || e->dur.decimals > 3)) return 0;
    if (e->dur.ns < 0 || n->rows >= rows->rows) return 0;
    int32_t name = intern(s, e->name, e->name_length);
    if (name < 0) return 0;
    int64_t i = n->rows++;
    rows->cat[i] = (int8_t)e->cat;
    rows->name[i] = name;
    rows->start[i] = e->ts.ns;
    rows->end[i] = e->ts.ns + e->dur.ns;
    rows->pid[i] = e->id[ID_PID];
    rows->tid[i] = e->id[ID_TID];
    rows->device[i] = e->id[ID_DEVICE];
    rows->stream[i] = e->id[ID_STREAM];
    rows->corr[i] = e->id[ID_CORR];
    rows->sequence[i] = e->id[ID_SEQUENCE];
    return !e->comm || aside(rows, n, i, e->args - text, e->args_end - text);
}

static int scan_array(Scanner *s, Text text, Text end, int bare, const Rows *rows, Counts *n) {
    static const uint8_t nothing = 0;
    Text p = skip_space(text, end);
    if (p >= end || *p != '[') return 0;
    p = skip_space(p + 1, end);
    if (p < end && *p == ']') return skip_space(p + 1, end) == end;
    for (;;) {
        if (p >= end || *p != '{') return 0;
        Event e; /* ts, dur and args are read where `seen` has them alone; clearing all took a tenth of the scan */
        e.seen = e.comm = e.odd_time = e.arrow = e.ph = 0;
        e.cat = UNKNOWN, e.name = &nothing, e.name_length = 0;
        e.id[ID_PID] = e.id[ID_TID] = 0;
        e.id[ID_DEVICE] = e.id[ID_STREAM] = e.id[ID_CORR] = e.id[ID_SEQUENCE] = -1;
        Text from = p;
        if (!(p = event_end(s, p, end, &e))) return 0;
        n->seen++;
        if (e.ph == 'X') {
            if (e.cat == UNKNOWN) e.cat = bare;
            if (e.cat != NOT_KEPT && !keep(s, &e, text, rows, n)) return 0;
        } else if (e.ph == 'M' || (e.arrow && (e.ph == 's' || e.ph == 'f')) || (e.ph == 'B' && e.cat >= 0)) {
            if (!aside(rows, n, e.ph == 'M' ? -1 : e.ph == 'B' ? -3 : -2, from - text, p - text)) return 0;
        }
        p = skip_space(p, end);
        if (p >= end) return 0;
        if (*p == ']') return skip_space(p + 1, end) == end;
        if (*p != ',') return 0;
        p = skip_space(p + 1, end);
    }
}

/* --- outside ---------------------------------------------------------------------------------------------- */

EXPORT int bubblescope_abi(void) { return ABI; }

EXPORT void bubblescope_free(Scanner *s) {
    if (!s) return;
    free(s->arena), free(s->offsets), free(s->hashes), free(s->table);
    free(s);
}

EXPORT Scanner *bubblescope_new(uint64_t seed) {
    Scanner *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->seed = seed;
    s->table_size = 1 << 10;
    s->table = malloc((size_t)s->table_size * sizeof *s->table);
    s->hashes = malloc((size_t)s->table_size * sizeof *s->hashes);
    s->arena = malloc((size_t)(s->arena_size = 1 << 12));
    s->offsets = malloc((size_t)(s->offsets_size = 1 << 8) * sizeof *s->offsets);
    if (!s->table || !s->hashes || !s->arena || !s->offsets) {
        bubblescope_free(s);
        return NULL;
    }
    memset(s->table, 0xFF, (size_t)s->table_size * sizeof *s->table);
    s->offsets[0] = 0;
    return s;
}

/* Add a category (lower case, at most 31 bytes). 0 when there is no room. */
EXPORT int bubblescope_category(Scanner *s, const char *text, int length, int code) {
    if (s->categories >= MAX_CATEGORIES || length < 0 || length >= 32) return 0;
    memcpy(s->cat_text[s->categories], text, (size_t)length);
    s->cat_len[s->categories] = length;
    s->cat_code[s->categories++] = (int8_t)code;
    return 1;
}

/* Fill `rows` from the JSON array of events in text[0..length), after the counts->rows that stand there. 1: done, and
 * counts say how much; 0: odd, nothing remembered. `bare`: the code of events without a category. */
EXPORT int bubblescope_scan(Scanner *s, Text text, int64_t length, int bare, const Rows *rows, Counts *counts) {
    int64_t names = s->names;
    Counts n = {.rows = counts->rows};
    int done = scan_array(s, text, text + length, bare, rows, &n);
    if (!done) {
        forget(s, names);
        return 0;
    }
    n.names = s->names;
    *counts = n;
    return 1;
}

/* Raw (still escaped) text of names: offsets()[i] .. offsets()[i + 1] in arena(). Valid until the next scan. */
EXPORT const uint8_t *bubblescope_arena(const Scanner *s) { return s->arena; }
EXPORT const int64_t *bubblescope_offsets(const Scanner *s) { return s->offsets; }
