// The free blocks of one pool and one stream, ordered by (size, address). Best fit: the first that is large enough.
//
// In the small pool there is one treap for each block size below 2 MiB and a two-level bitmap of the treaps that are
// not empty, so that a typical insert, erase or search touches one or two cache lines. Larger blocks share one treap.
#pragma once

#include "memory/allocator_blocks.h"

#include <array>

namespace backplane {

class FreeBlocks {
 public:
  FreeBlocks(c10::StreamId stream, bool small) : stream(stream), roots_(small ? kClasses : 1, nullptr) {}

  const c10::StreamId stream;

  void insert(Block* block) {
    size_t index = class_of(block->size);
    Block** link = &roots_[index];
    while (*link != nullptr && (*link)->priority >= block->priority) {
      link = less(block, *link) ? &(*link)->left : &(*link)->right;
    }
    split(*link, block, &block->left, &block->right);
    *link = block;
    words_[index / 64] |= uint64_t{1} << (index % 64);
    summary_ |= uint64_t{1} << (index / 64);
  }

  void erase(Block* block) {
    size_t index = class_of(block->size);
    Block** link = &roots_[index];
    while (*link != block) {
      link = less(block, *link) ? &(*link)->left : &(*link)->right;
    }
    *link = merge(block->left, block->right);
    block->left = block->right = nullptr;
    if (roots_[index] == nullptr) {
      words_[index / 64] &= ~(uint64_t{1} << (index % 64));
      if (words_[index / 64] == 0) {
        summary_ &= ~(uint64_t{1} << (index / 64));
      }
    }
  }

  // The smallest block of at least `size` bytes, with the lowest address among equals; nullptr if there is none.
  Block* at_least(size_t size) const {
    size_t index = class_of(size);
    Block* found = nullptr;
    for (Block* block = roots_[index]; block != nullptr;) {
      if (block->size >= size) {
        found = block;
        block = block->left;
      } else {
        block = block->right;
      }
    }
    return found != nullptr ? found : first_above(index);
  }

  Block* next(const Block* block) const {
    size_t index = class_of(block->size);
    Block* found = nullptr;
    for (Block* other = roots_[index]; other != nullptr;) {
      if (less(block, other)) {
        found = other;
        other = other->left;
      } else {
        other = other->right;
      }
    }
    return found != nullptr ? found : first_above(index);
  }

  Block* largest() const {
    if (summary_ == 0) {
      return nullptr;
    }
    size_t word = 63 - __builtin_clzll(summary_);
    Block* block = roots_[word * 64 + 63 - __builtin_clzll(words_[word])];
    while (block->right != nullptr) {
      block = block->right;
    }
    return block;
  }

 private:
  static constexpr size_t kClasses = 4096; // the last one holds every size from 2 MiB - 512 on

  size_t class_of(size_t size) const {
    return std::min(size / kMinBlock, roots_.size() - 1);
  }

  Block* first_above(size_t index) const {
    size_t word = index / 64;
    // Shifting by 64 is undefined: shift in two steps.
    uint64_t rest = words_[word] & (~uint64_t{0} << (index % 64) << 1);
    if (rest == 0) {
      uint64_t later = summary_ & (~uint64_t{0} << word << 1);
      if (later == 0) {
        return nullptr;
      }
      word = __builtin_ctzll(later);
      rest = words_[word];
    }
    Block* block = roots_[word * 64 + __builtin_ctzll(rest)];
    while (block->left != nullptr) {
      block = block->left;
    }
    return block;
  }

  static bool less(const Block* a, const Block* b) {
    return a->size != b->size ? a->size < b->size : a->address < b->address;
  }

  // Splits a treap into the blocks before and after `block`.
  static void split(Block* root, const Block* block, Block** before, Block** after) {
    while (root != nullptr) {
      if (less(root, block)) {
        *before = root;
        before = &root->right;
        root = root->right;
      } else {
        *after = root;
        after = &root->left;
        root = root->left;
      }
    }
    *before = *after = nullptr;
  }

  // Joins two treaps, all of `a` before all of `b`.
  static Block* merge(Block* a, Block* b) {
    Block* root = nullptr;
    Block** link = &root;
    while (a != nullptr && b != nullptr) {
      if (a->priority >= b->priority) {
        *link = a;
        link = &a->right;
        a = a->right;
      } else {
        *link = b;
        link = &b->left;
        b = b->left;
      }
    }
    *link = a != nullptr ? a : b;
    return root;
  }

  std::vector<Block*> roots_;
  std::array<uint64_t, kClasses / 64> words_{}; // bit i of word w: class 64w + i is not empty
  uint64_t summary_ = 0; // bit w: word w is not zero
};

} // namespace backplane
