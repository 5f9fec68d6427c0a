/* Layout of frames and of a slot's control tail, for C11, C++17 and CUDA.
 *
 * protocol/src/abi.rs says the same in Rust; a test there compiles this header and compares every
 * size and offset. The meaning of the fields is in docs/reference/wire-format.md. All numbers are
 * little-endian. Change nothing here without raising SY_FRAME_VERSION.
 */
#ifndef SWITCHYARD_ABI_H
#define SWITCHYARD_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define SY_STATIC_ASSERT(condition, message) static_assert(condition, message)
#else
#define SY_STATIC_ASSERT(condition, message) _Static_assert(condition, message)
#endif

/* "SYFR" as a little-endian word. */
#define SY_FRAME_MAGIC UINT32_C(0x52465953)
#define SY_FRAME_VERSION 1

/* sy_frame_header.kind */
#define SY_KIND_DISPATCH 1
#define SY_KIND_COMBINE 2
#define SY_KIND_ERROR 3

/* sy_frame_header.dtype and .response_dtype */
#define SY_DTYPE_F32 1
#define SY_DTYPE_F16 2
#define SY_DTYPE_BF16 3
#define SY_DTYPE_F8_E4M3 4

/* sy_frame_header.flags */
#define SY_FLAG_PAYLOAD_CRC UINT32_C(1)

#define SY_SCALE_BLOCK 128
#define SY_PAYLOAD_ALIGN 128
#define SY_TABLE_ALIGN 16
#define SY_ROW_ALIGN 16
#define SY_MAX_ERROR_MESSAGE 240
#define SY_MAX_HIDDEN (UINT32_C(1) << 20)

/* sy_error_body.code */
#define SY_ERROR_BAD_FRAME 1
#define SY_ERROR_UNKNOWN_EXPERT 2
#define SY_ERROR_WRONG_LAYER 3
#define SY_ERROR_NOT_MY_EXPERT 4
#define SY_ERROR_STALE_EPOCH 5
#define SY_ERROR_STALE_CHANNEL 6
#define SY_ERROR_OVERLOADED 7
#define SY_ERROR_SHUTTING_DOWN 8
#define SY_ERROR_INTERNAL 9
#define SY_ERROR_VERSION 10

/* Control tail: the last SY_CONTROL_BYTES of a slot. 64-bit words, each on lines of its own. */
#define SY_CONTROL_BYTES 4096
#define SY_CONTROL_STRIDE 128
#define SY_WORD_PUBLISHED 0
#define SY_WORD_CONSUMED 128
#define SY_WORD_PROGRESS 256
#define SY_WORD_WAITING 384

/* Head of every frame. Offsets count bytes from the start of the frame. */
typedef struct sy_frame_header {
    uint64_t epoch;
    uint64_t client_id;
    uint64_t sequence;
    uint32_t generation;
    uint32_t layer;
    uint32_t magic;
    uint16_t version;
    uint16_t kind;
    uint16_t dtype;
    uint16_t response_dtype;
    uint32_t flags;
    uint32_t num_tokens;
    uint32_t num_entries;
    uint32_t hidden;
    uint32_t frame_idx;
    uint32_t num_frames;
    uint32_t row_stride_bytes;
    uint32_t tokens_offset;
    uint32_t entries_offset;
    uint32_t scales_offset;
    uint32_t payload_offset;
    uint64_t total_bytes;
    uint32_t header_crc;
    uint32_t payload_crc;
    uint32_t server_queue_ns;
    uint32_t server_compute_ns;
    uint32_t reserved[4];
} sy_frame_header;

/* The entries that apply to one token. */
typedef struct sy_token {
    uint32_t entry_begin;
    uint32_t entry_count;
} sy_token;

/* An expert, numbered within the layer over the whole model, and the weight of its output. */
typedef struct sy_entry {
    uint32_t expert;
    float weight;
} sy_entry;

/* Payload of an error frame. */
typedef struct sy_error_body {
    uint32_t code;
    uint32_t message_len;
    uint64_t detail[2];
    uint8_t message[SY_MAX_ERROR_MESSAGE];
} sy_error_body;

SY_STATIC_ASSERT(sizeof(float) == 4, "weights are IEEE single precision");
SY_STATIC_ASSERT(sizeof(sy_frame_header) == 128, "size of sy_frame_header");
SY_STATIC_ASSERT(sizeof(sy_frame_header) % SY_PAYLOAD_ALIGN == 0, "an error body follows directly");
SY_STATIC_ASSERT(offsetof(sy_frame_header, epoch) == 0, "the epoch leads");
SY_STATIC_ASSERT(offsetof(sy_frame_header, client_id) == 8, "client_id");
SY_STATIC_ASSERT(offsetof(sy_frame_header, sequence) == 16, "sequence");
SY_STATIC_ASSERT(offsetof(sy_frame_header, generation) == 24, "generation");
SY_STATIC_ASSERT(offsetof(sy_frame_header, layer) == 28, "layer");
SY_STATIC_ASSERT(offsetof(sy_frame_header, magic) == 32, "magic");
SY_STATIC_ASSERT(offsetof(sy_frame_header, version) == 36, "version");
SY_STATIC_ASSERT(offsetof(sy_frame_header, kind) == 38, "kind");
SY_STATIC_ASSERT(offsetof(sy_frame_header, dtype) == 40, "dtype");
SY_STATIC_ASSERT(offsetof(sy_frame_header, response_dtype) == 42, "response_dtype");
SY_STATIC_ASSERT(offsetof(sy_frame_header, flags) == 44, "flags");
SY_STATIC_ASSERT(offsetof(sy_frame_header, num_tokens) == 48, "num_tokens");
SY_STATIC_ASSERT(offsetof(sy_frame_header, num_entries) == 52, "num_entries");
SY_STATIC_ASSERT(offsetof(sy_frame_header, hidden) == 56, "hidden");
SY_STATIC_ASSERT(offsetof(sy_frame_header, frame_idx) == 60, "frame_idx");
SY_STATIC_ASSERT(offsetof(sy_frame_header, num_frames) == 64, "num_frames");
SY_STATIC_ASSERT(offsetof(sy_frame_header, row_stride_bytes) == 68, "row_stride_bytes");
SY_STATIC_ASSERT(offsetof(sy_frame_header, tokens_offset) == 72, "tokens_offset");
SY_STATIC_ASSERT(offsetof(sy_frame_header, entries_offset) == 76, "entries_offset");
SY_STATIC_ASSERT(offsetof(sy_frame_header, scales_offset) == 80, "scales_offset");
SY_STATIC_ASSERT(offsetof(sy_frame_header, payload_offset) == 84, "payload_offset");
SY_STATIC_ASSERT(offsetof(sy_frame_header, total_bytes) == 88, "total_bytes");
SY_STATIC_ASSERT(offsetof(sy_frame_header, header_crc) == 96, "header_crc");
SY_STATIC_ASSERT(offsetof(sy_frame_header, payload_crc) == 100, "payload_crc");
SY_STATIC_ASSERT(offsetof(sy_frame_header, server_queue_ns) == 104, "server_queue_ns");
SY_STATIC_ASSERT(offsetof(sy_frame_header, server_compute_ns) == 108, "server_compute_ns");
SY_STATIC_ASSERT(offsetof(sy_frame_header, reserved) == 112, "reserved");
SY_STATIC_ASSERT(sizeof(sy_token) == 8 && offsetof(sy_token, entry_count) == 4, "sy_token");
SY_STATIC_ASSERT(sizeof(sy_entry) == 8 && offsetof(sy_entry, weight) == 4, "sy_entry");
SY_STATIC_ASSERT(sizeof(sy_error_body) == 264, "size of sy_error_body");
SY_STATIC_ASSERT(offsetof(sy_error_body, message_len) == 4, "message_len");
SY_STATIC_ASSERT(offsetof(sy_error_body, detail) == 8, "detail");
SY_STATIC_ASSERT(offsetof(sy_error_body, message) == 24, "message");

#endif /* SWITCHYARD_ABI_H */
