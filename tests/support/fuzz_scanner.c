/* Mutates sound traces and scans them, for a compiler with -fsanitize=address,undefined.
 *
 *   fuzz_scanner SEED ROUNDS FILE...     each FILE: a JSON array of events
 *
 * The text lies in a block of exactly its size, so that reading one byte past it is seen. Exit status 0: no fault.
 */
#include "../../bubblescope/ingest/native/scanner.c"

#include <stdio.h>

static uint64_t state;

static uint64_t next(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static size_t below(size_t n) { return n ? (size_t)(next() % n) : 0; }

static uint8_t *file_text(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    if (!f) exit(2);
    fseek(f, 0, SEEK_END);
    *size = (size_t)ftell(f);
    rewind(f);
    uint8_t *text = malloc(*size + 1);
    if (fread(text, 1, *size, f) != *size) exit(2);
    fclose(f);
    return text;
}

/* Any of the events' own bytes, JSON's punctuation, or noise. */
static uint8_t any_byte(void) {
    static const char some[] = "{}[]\",:\\/.-+eE0123456789tfnuXM \n\x00\x1f\x7f\x80\xc3\xe2\xed\xf4\xff";
    return next() & 1 ? (uint8_t)some[below(sizeof some - 1)] : (uint8_t)next();
}

/* A piece of the text with some changes. */
static uint8_t *mutated(const uint8_t *whole, size_t size, size_t *out) {
    size_t from = next() & 1 ? 0 : below(size), length = next() & 3 ? below(3000) : below(size - from);
    if (length > size - from) length = size - from;
    if (!(next() & 3)) from = 0, length = size;
    uint8_t *text = malloc(length + 1);
    memcpy(text, whole + from, length);
    if (length && next() & 1) text[0] = '[';
    if (length && next() & 1) text[length - 1] = ']';
    for (size_t changes = below(6); length && changes; changes--) {
        size_t at = below(length), many = below(9);
        if (next() & 1) text[at] = any_byte();
        else if (at + 2 * many < length) memmove(text + at, text + at + many, many);
        else length = at;
    }
    uint8_t *exact = malloc(length ? length : 1);
    memcpy(exact, text, length);
    free(text);
    *out = length;
    return exact;
}

static void scan_once(Scanner *s, const uint8_t *text, size_t size) {
    enum { ROOM = 1024 };
    int64_t room = below(4) ? ROOM : (int64_t)below(4);
    static int64_t wide[8][ROOM], aside[3 * ROOM];
    static int8_t cat[ROOM];
    static int32_t name[ROOM];
    Rows rows = {cat, name, wide[0], wide[1], wide[2], wide[3], wide[4], wide[5], wide[6], wide[7], aside, room, room};
    Counts n = {.rows = (int64_t)below(3)};
    const int64_t before = n.rows;
    if (!bubblescope_scan(s, text, (int64_t)size, 8, &rows, &n)) return;
    for (int64_t i = before; i < n.rows; i++)
        if (name[i] < 0 || name[i] >= n.names) abort();
    for (int64_t i = 0; i < n.asides; i++)
        if (aside[3 * i] >= n.rows || aside[3 * i + 1] < 0 || aside[3 * i + 2] > (int64_t)size) abort();
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    state = strtoull(argv[1], NULL, 10) * 2 + 1;
    long rounds = strtol(argv[2], NULL, 10);
    for (int i = 3; i < argc; i++) {
        size_t size, length;
        uint8_t *whole = file_text(argv[i], &size);
        Scanner *s = bubblescope_new(next());
        bubblescope_category(s, "kernel", 6, 0);
        bubblescope_category(s, "cpu_op", 6, 3);
        bubblescope_category(s, "user_annotation", 15, 4);
        bubblescope_category(s, "", 0, 8);
        for (long round = 0; round < rounds; round++) {
            uint8_t *text = mutated(whole, size, &length);
            scan_once(s, text, length);
            free(text);
        }
        bubblescope_free(s);
        free(whole);
    }
    return 0;
}
