#include "frame.h"

static uint32_t le32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

long frame_decode(const uint8_t *p, size_t n, struct frame *out)
{
    if (n < FRAME_HEADER)
        return 0;
    uint32_t length = le32(p);
    uint8_t type = p[8];
    bool known = (type >= F_HELLO && type <= F_OPERATIONS) || type == F_CONFIG || type == F_BYE;
    if (length > FRAME_MAX || !known || p[10] || p[11])
        return -1;
    if (n - FRAME_HEADER < length)
        return 0;
    *out = (struct frame){ .channel = le32(p + 4), .type = type, .flags = p[9],
                           .payload = p + FRAME_HEADER, .length = length };
    return FRAME_HEADER + (long)length;
}

void frame_head(uint8_t out[FRAME_HEADER], uint32_t length, uint32_t channel, uint8_t type, uint8_t flags)
{
    for (int i = 0; i < 4; i++) {
        out[i] = (uint8_t)(length >> (8 * i));
        out[4 + i] = (uint8_t)(channel >> (8 * i));
    }
    out[8] = type;
    out[9] = flags;
    out[10] = out[11] = 0;
}

void frame_put(struct buf *b, uint32_t channel, uint8_t type, uint8_t flags, const void *p, size_t n)
{
    uint8_t head[FRAME_HEADER];
    frame_head(head, (uint32_t)n, channel, type, flags);
    if (buf_reserve(b, sizeof head + n)) {
        buf_put(b, head, sizeof head);
        buf_put(b, p, n);
    }
}

void frame_put_u64(struct buf *b, uint32_t channel, uint8_t type, uint8_t flags, uint64_t v)
{
    uint8_t out[8];
    for (int i = 0; i < 8; i++)
        out[i] = (uint8_t)(v >> (8 * i));
    frame_put(b, channel, type, flags, out, sizeof out);
}

uint64_t frame_u64(const struct frame *f)
{
    if (f->length != 8)
        return UINT64_MAX;
    return (uint64_t)le32(f->payload) | (uint64_t)le32(f->payload + 4) << 32;
}
