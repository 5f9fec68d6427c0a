// Options of cutlass_experts: its cases, and the parameters of their measurement.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>
#include <vector>

namespace {

constexpr int kNumPositions = 4096, kNumPositionsChecked = 65536; // multiples of 256

struct Model {
    const char* name;
    int hidden, inter, num_experts;
};

constexpr Model kModels[] = {
    {"deepseek-v3", 7168, 2048, 32},
    {"qwen3-30b-a3b", 2048, 768, 128},
};
constexpr int kTokens[] = {1, 4, 16, 64, 256, 1024};

struct Case {
    Model model;
    bool fp8;
    int num_tokens; // of each expert
};

struct Options {
    std::vector<Case> cases;
    int num_replays = 200;
    int num_positions = kNumPositions;
};

std::vector<std::string> split(const std::string& list) {
    std::vector<std::string> parts;
    for (size_t begin = 0; begin <= list.size();) {
        const size_t end = std::min(list.find(',', begin), list.size());
        parts.push_back(list.substr(begin, end - begin));
        begin = end + 1;
    }
    return parts;
}

[[noreturn]] void usage(const std::string& wrong) {
    fprintf(stderr,
            "cutlass_experts: %s\nusage: cutlass_experts [--model deepseek-v3,qwen3-30b-a3b] "
            "[--dtype bf16,fp8] [--tokens 1,4,16,64,256,1024] [--replays N] [--check]\n",
            wrong.c_str());
    exit(2);
}

int number_of(const std::string& text, const char* option, int most) {
    char* end;
    const long value = strtol(text.c_str(), &end, 10);
    if (text.empty() || *end != 0 || value < 1 || value > most)
        usage(std::string(option) + " " + text);
    return value;
}

Options parse(int argc, char** argv) {
    Options options;
    std::vector<Model> models(std::begin(kModels), std::end(kModels));
    std::vector<std::string> dtypes = {"bf16", "fp8"};
    std::vector<int> tokens(std::begin(kTokens), std::end(kTokens));
    for (int i = 1; i < argc; ++i) {
        const std::string option = argv[i];
        if (option == "--check") {
            options.num_positions = kNumPositionsChecked;
            continue;
        }
        if (i + 1 == argc)
            usage(option);
        const std::string value = argv[++i];
        if (option == "--model") {
            models.clear();
            for (const std::string& name : split(value)) {
                const size_t before = models.size();
                for (const Model& model : kModels)
                    if (name == model.name)
                        models.push_back(model);
                if (models.size() == before)
                    usage("--model " + name);
            }
        } else if (option == "--dtype") {
            dtypes = split(value);
            for (const std::string& dtype : dtypes)
                if (dtype != "bf16" && dtype != "fp8")
                    usage("--dtype " + dtype);
        } else if (option == "--tokens") {
            tokens.clear();
            for (const std::string& count : split(value))
                tokens.push_back(number_of(count, "--tokens", 1024));
        } else if (option == "--replays") {
            options.num_replays = number_of(value, "--replays", 100'000);
        } else {
            usage(option);
        }
    }
    for (const Model& model : models)
        for (const std::string& dtype : dtypes)
            for (const int num_tokens : tokens)
                options.cases.push_back({model, dtype == "fp8", num_tokens});
    return options;
}

} // namespace
