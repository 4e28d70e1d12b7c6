// Instructions of pipeline ranks as rows of integers: made from a schedule, and written as JSON.
#pragma once

#include <charconv>
#include <functional>
#include <queue>
#include <stdexcept>
#include <string>

#include "numbers.hpp"

namespace dynapipe::programs {

enum Letter : int { kLoad, kForward, kBackward, kBackwardInput, kBackwardWeight, kSend, kRecv, kWaitSend, kWaitRecv };

// A row of `Program.table`; what an instruction does not have is 0.
struct Instruction {
  int letter, stage, micro_batch, is_gradient, peer, channel, specs;
};
constexpr std::size_t kColumns = sizeof(Instruction) / sizeof(int);

struct Action {
  int letter, stage, micro_batch;
};

using RankActions = std::vector<std::vector<Action>>;
using RankSpans = std::vector<std::vector<std::pair<i64, i64>>>;  // start, end
using RankRows = std::vector<std::vector<Instruction>>;

// A buffer that changes ranks; positions are indices into the two ranks' actions.
struct Message {
  int is_gradient, stage, micro_batch, sender, sent_after, receiver, used_by;
};

class Lowering {
 public:
  // `transfer` and `specs` are tables of (boundary, micro-batch).
  Lowering(const RankActions& ranks, int stages, int micro_batches, const RankSpans& times, const RankSpans& order_times,
           const i64* transfer, const int* specs)
      : ranks_(ranks), stages_(stages), count_(micro_batches), times_(times), order_times_(order_times),
        transfer_(transfer), specs_(specs) {
    find_messages();
  }

  RankRows rows() {
    std::vector<RankRows> before(ranks_.size());  // [rank][action]
    for (std::size_t r = 0; r < ranks_.size(); ++r) before[r].resize(ranks_[r].size() + 1);
    const auto ordered = in_one_order();
    for (const auto& [m, post] : ordered) {
      before[messages_[m].receiver][post].push_back(transfer_row(kRecv, messages_[m], messages_[m].sender));
    }
    for (const auto& [m, post] : ordered) {
      const Message& message = messages_[m];
      const i64 arrival = times_[message.sender][message.sent_after].second + transfer_[place_of(message)];
      const auto& spans = times_[message.sender];
      const auto later = std::upper_bound(spans.begin(), spans.end(), arrival, [](i64 at, const auto& span) { return at < span.first; });
      const int wait = std::max(static_cast<int>(later - spans.begin()), message.sent_after + 1);
      before[message.sender][wait].push_back({kWaitSend, message.stage, message.micro_batch, message.is_gradient, 0, 0, 0});
    }
    RankRows rows(ranks_.size());
    for (std::size_t r = 0; r < ranks_.size(); ++r) rows[r] = rank_rows(static_cast<int>(r), before[r]);
    return rows;
  }

 private:
  std::size_t index(int stage, int micro_batch) const { return static_cast<std::size_t>(stage) * count_ + micro_batch; }
  std::size_t place_of(const Message& message) const { return index(message.stage - message.is_gradient, message.micro_batch); }

  Instruction transfer_row(Letter letter, const Message& message, int peer) const {
    const int channel = message.sender < message.receiver ? 0 : 1;
    return {letter, message.stage, message.micro_batch, message.is_gradient, peer, channel, specs_[place_of(message)]};
  }

  void find_messages() {
    const std::size_t slots = index(stages_, 0);
    std::vector<std::pair<int, int>> takers[2];
    for (auto& one : takers) one.assign(slots, {-1, -1});
    sent_.resize(ranks_.size());
    source_.resize(ranks_.size());
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      sent_[r].assign(ranks_[r].size(), -1);
      source_[r].assign(ranks_[r].size(), -1);
      for (std::size_t i = 0; i < ranks_[r].size(); ++i) {
        const Action& action = ranks_[r][i];
        if (action.letter == kBackwardWeight) continue;
        takers[action.letter != kForward][index(action.stage, action.micro_batch)] = {static_cast<int>(r), static_cast<int>(i)};
      }
    }
    for (int is_gradient = 0; is_gradient < 2; ++is_gradient) {
      for (int stage = is_gradient; stage + 1 - is_gradient < stages_; ++stage) {
        for (int m = 0; m < count_; ++m) add_message(takers[is_gradient], is_gradient, stage, m);
      }
    }
  }

  void add_message(const std::vector<std::pair<int, int>>& takers, int is_gradient, int stage, int m) {
    const auto [sender, sent_after] = takers[index(stage, m)];
    if (sender < 0) return;
    const auto [receiver, used_by] = takers[index(is_gradient ? stage - 1 : stage + 1, m)];
    if (receiver < 0) throw std::invalid_argument("no action takes what another one makes");
    if (receiver == sender) return;
    sent_[sender][sent_after] = source_[receiver][used_by] = static_cast<int>(messages_.size());
    messages_.push_back({is_gradient, stage, m, sender, sent_after, receiver, used_by});
  }

  // Messages by when they are predicted to be sent, each with the action of its receiver that follows. Of actions that
  // end at one time, what another needs comes first.
  std::vector<std::pair<int, int>> in_one_order() const {
    std::vector<int> num_done(ranks_.size(), 0);
    const auto is_ready = [&](int rank) {
      const auto& sources = source_[rank];
      if (num_done[rank] == static_cast<int>(sources.size())) return false;
      const int needed = sources[num_done[rank]];
      return needed < 0 || num_done[messages_[needed].sender] > messages_[needed].sent_after;
    };
    std::priority_queue<std::pair<i64, int>, std::vector<std::pair<i64, int>>, std::greater<>> ready;
    const auto push = [&](int rank) {
      if (is_ready(rank)) ready.emplace(order_times_[rank][num_done[rank]].second, rank);
    };
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) push(static_cast<int>(rank));
    std::vector<std::pair<int, int>> ordered;
    ordered.reserve(messages_.size());
    while (!ready.empty()) {
      const int rank = ready.top().second;
      ready.pop();
      const int m = sent_[rank][num_done[rank]++];
      push(rank);
      if (m < 0) continue;
      const Message& message = messages_[m];
      ordered.emplace_back(m, num_done[message.receiver]);
      if (num_done[message.receiver] == message.used_by) push(message.receiver);
    }
    return ordered;
  }

  // Receives are posted first, then finished sends give up their memory, then the action's input is awaited.
  std::vector<Instruction> rank_rows(int rank, const RankRows& before) const {
    std::vector<Instruction> rows;
    std::vector<char> loaded(count_, 0);
    const auto& actions = ranks_[rank];
    for (std::size_t i = 0; i <= actions.size(); ++i) {
      rows.insert(rows.end(), before[i].begin(), before[i].end());
      if (i == actions.size()) break;
      const auto [letter, stage, m] = actions[i];
      if (source_[rank][i] >= 0) {
        const Message& message = messages_[source_[rank][i]];
        rows.push_back({kWaitRecv, message.stage, m, message.is_gradient, 0, 0, 0});
      }
      if (!loaded[m]) {
        loaded[m] = 1;
        rows.push_back({kLoad, 0, m, 0, 0, 0, 0});
      }
      rows.push_back({letter, stage, m, 0, 0, 0, 0});
      if (sent_[rank][i] >= 0) {
        const Message& message = messages_[sent_[rank][i]];
        rows.push_back(transfer_row(kSend, message, message.receiver));
      }
    }
    return rows;
  }

  const RankActions& ranks_;
  const int stages_, count_;
  const RankSpans &times_, &order_times_;
  const i64* transfer_;
  const int* specs_;
  std::vector<Message> messages_;
  std::vector<std::vector<int>> sent_, source_;  // of each rank's actions: the message it sends, or needs, or -1
};

// The JSON of a program without the brackets around it, and its specs in the order of their first use, which is what
// the text calls them by.
inline std::pair<std::string, std::vector<int>> program_text(const Instruction* rows, std::size_t count, int num_specs) {
  std::string text;
  std::vector<int> order, name(num_specs, -1);
  text.reserve(20 * count);
  const auto add = [&text](int value) {
    char digits[12];
    text.push_back(',');
    text.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
  };
  for (std::size_t i = 0; i < count; ++i) {
    const Instruction& row = rows[i];
    if (row.letter < 0 || row.letter > kWaitRecv) throw std::invalid_argument("no instruction has this letter");
    if (i) text.push_back(',');
    text.append("[\"").push_back("LFBIWSRsr"[row.letter]);
    text.push_back('"');
    if (row.letter >= kSend) text.append(row.is_gradient ? ",\"g\"" : ",\"a\"");
    if (row.letter != kLoad) add(row.stage);
    add(row.micro_batch);
    if (row.letter == kSend || row.letter == kRecv) {
      if (row.specs < 0 || row.specs >= num_specs) throw std::invalid_argument("a transfer names no specs");
      if (name[row.specs] < 0) {
        name[row.specs] = static_cast<int>(order.size());
        order.push_back(row.specs);
      }
      add(row.peer);
      add(row.channel);
      add(name[row.specs]);
    }
    text.push_back(']');
  }
  return {std::move(text), std::move(order)};
}

}  // namespace dynapipe::programs
