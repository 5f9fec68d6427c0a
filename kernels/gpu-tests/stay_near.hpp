// The processors that a program stays on, and with them its memory.
#pragma once

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <sched.h>

#include "check.hpp"

// Keeps this thread on processors near a GPU, so that host memory allocated from now on is near it, too.
// Returns the processors, or "any" where the system does not say which are.
inline std::string stay_near(int gpu) {
    char bus_id[32] = {};
    CHECK_CUDA(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), gpu));
    for (char& c : bus_id)
        c = static_cast<char>(tolower(c));
    FILE* file =
        fopen((std::string("/sys/bus/pci/devices/") + bus_id + "/local_cpulist").c_str(), "r");
    char list[256] = {};
    if (file == nullptr || fgets(list, sizeof(list), file) == nullptr) {
        if (file != nullptr)
            fclose(file);
        return "any";
    }
    fclose(file);
    list[strcspn(list, "\n")] = 0;
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    for (const char* at = list; *at != 0;) {
        char* end = nullptr;
        const unsigned long first = strtoul(at, &end, 10);
        unsigned long last = first;
        if (*end == '-')
            last = strtoul(end + 1, &end, 10);
        for (unsigned long cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu)
            CPU_SET(cpu, &cpus);
        at = *end == ',' ? end + 1 : end;
        if (end == at && *at != 0)
            break;
    }
    return sched_setaffinity(0, sizeof(cpus), &cpus) == 0 ? list : "any";
}
