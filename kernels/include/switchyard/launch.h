/* Launchers of the GPU data path. Each checks its parameters, enqueues one kernel on `stream` and
 * returns SY_OK or SY_LAUNCH_*; none synchronises, and all may be captured into a graph. */
#ifndef SWITCHYARD_LAUNCH_H
#define SWITCHYARD_LAUNCH_H

#include "switchyard/device_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st* sy_stream;

/* Sends every token to each server that holds one of its experts. */
int sy_launch_dispatch(const sy_dispatch_params* params, sy_stream stream);
/* Waits for the servers' rows and sums them per token in ascending order of the servers. */
int sy_launch_combine(const sy_combine_params* params, sy_stream stream);
/* Takes the frames that are ready, checks them and sorts their entries by expert. */
int sy_launch_expert_recv(const sy_expert_recv_params* params, sy_stream stream);
/* Computes every entry's expert: three kernels, sized by the device's counts. */
int sy_launch_expert_compute(const sy_expert_compute_params* params, sy_stream stream);
/* Sums the experts' weighted outputs per token and answers every client of the batch. */
int sy_launch_expert_send(const sy_expert_send_params* params, sy_stream stream);
/* Answers every client's frame as identity experts would. */
int sy_launch_echo(const sy_echo_params* params, sy_stream stream);

/* put + flag to every peer and back, `num_turns` times; the peers run the same with begins = 0. */
int sy_launch_pingpong(const sy_p2p_params* params, sy_stream stream);
/* Messages in one direction, to every peer at once; each peer acknowledges once. */
int sy_launch_stream(const sy_p2p_params* params, sy_stream stream);

/* Checks a table of peers before the host copies it to the device: SY_OK or SY_LAUNCH_*. */
int sy_check_servers(const sy_server_peer* servers, uint32_t num_servers);
int sy_check_clients(const sy_client_peer* clients, uint32_t num_clients);

/* Fills in the maps of a layer whose addresses and dtype are set. The layer's matrices lie in
 * memory of the current device. The result goes to device memory, at a multiple of 64. */
int sy_describe_layer(sy_layer_weights* layer, uint32_t hidden, uint32_t inter,
                      uint32_t num_local_experts);

/* Name of a launcher's code, for messages. */
const char* sy_launch_error(int code);

#ifdef __cplusplus
}
#endif

#endif /* SWITCHYARD_LAUNCH_H */
