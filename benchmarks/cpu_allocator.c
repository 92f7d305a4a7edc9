// Counts the bytes that torch's CPU allocator has given out. It is the only caller of posix_memalign in a rank.
// cc -shared -fPIC -O2 -o cpu_allocator.so cpu_allocator.c; LD_PRELOAD=./cpu_allocator.so
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define HEADER 64 // bytes before each block, which keep its alignment, its size and MAGIC
#define MAGIC 0x5ca1ab1e0ddba11UL

extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

static _Atomic int64_t live, peak;

static void add(int64_t size) {
    int64_t now = atomic_fetch_add(&live, size) + size, highest = atomic_load(&peak);
    while (now > highest && !atomic_compare_exchange_weak(&peak, &highest, now)) {
    }
}

int posix_memalign(void **result, size_t alignment, size_t size) {
    char *block = __libc_memalign(HEADER, HEADER + size);
    if (alignment > HEADER || block == NULL)
        return alignment > HEADER ? EINVAL : ENOMEM;
    uint64_t *header = (uint64_t *)(block + HEADER) - 2;
    header[0] = MAGIC;
    header[1] = size;
    add((int64_t)size);
    *result = block + HEADER;
    return 0;
}

void free(void *block) {
    uint64_t *header = (uint64_t *)block - 2; // of another block, it is what glibc keeps there
    if (block != NULL && (uintptr_t)block % HEADER == 0 && header[0] == MAGIC) {
        add(-(int64_t)header[1]);
        header[0] = 0;
        block = (char *)block - HEADER;
    }
    __libc_free(block);
}

int64_t allocated(void) { return live; }

int64_t most_allocated(void) { return peak; }

void forget_peak(void) { peak = live; }
